"""Random sketches: matrices Omega (n x q), q << n, with E[Omega Omega^T] = I.

A sketch approximates a product, G G^T ~ (G Omega)(G Omega)^T, and reduces the number of equations of the least-squares
problem in :mod:`ngplus.fisher.inverses`. The paper samples columns uniformly, and mentions other sketches without
naming them; the Gaussian, CountSketch and SRHT (subsampled randomized Hadamard transform) kinds stand for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SketchSpec:
    """The parsed ``sketch`` argument: the size q, the kind, and whether uniform sampling is with replacement."""

    size: int
    kind: str = "uniform"
    replacement: bool = True

    @classmethod
    def parse(cls, value: int | Mapping[str, Any] | None) -> SketchSpec | None:
        """Parses ``sketch``: None, a size q, or a mapping with ``size``, ``kind`` and ``replacement``."""
        if value is None:
            return None
        if isinstance(value, Mapping):
            unknown = set(value) - {"size", "kind", "replacement"}
            if unknown or "size" not in value:
                raise ValueError(
                    f"Invalid sketch: {dict(value)} (its keys are 'size' and, as options, 'kind' and 'replacement')"
                )
            spec = cls(value["size"], value.get("kind", "uniform"), bool(value.get("replacement", True)))
        else:
            spec = cls(value)
        if isinstance(spec.size, bool) or not isinstance(spec.size, int) or spec.size < 1:
            raise ValueError(f"Invalid sketch size: {spec.size!r} (a whole number of 1 or more)")
        if spec.kind not in KINDS:
            raise ValueError(f"Invalid sketch kind: {spec.kind!r} (one of {', '.join(KINDS)})")
        return spec


class Uniform:
    """Picks q of the n columns at random, times sqrt(n / q). For x with N rows, it costs N q."""

    def __init__(self, n: int, spec: SketchSpec, generator: torch.Generator) -> None:
        q = spec.size
        if not spec.replacement and q > n:
            raise ValueError(
                f"Invalid sketch size: {q} of {n} columns without replacement (at most {n}, or replacement=True)"
            )
        if spec.replacement:
            self._index = torch.randint(n, (q,), generator=generator)
        else:
            self._index = torch.randperm(n, generator=generator)[:q]
        self._scale = math.sqrt(n / q)

    def __call__(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self._index.to(x.device)) * self._scale


class Gaussian:
    """Independent normal entries of variance 1 / q. It costs N n q."""

    def __init__(self, n: int, spec: SketchSpec, generator: torch.Generator) -> None:
        self._omega = torch.randn(n, spec.size, generator=generator, dtype=torch.float64) / math.sqrt(spec.size)

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self._omega.to(x)


class CountSketch:
    """Adds each column, with a random sign, to one of q columns. It costs N n."""

    def __init__(self, n: int, spec: SketchSpec, generator: torch.Generator) -> None:
        self._size = spec.size
        self._index = torch.randint(spec.size, (n,), generator=generator)
        self._signs = _random_signs(n, generator)

    def __call__(self, x: Tensor) -> Tensor:
        signed = x * self._signs.to(x)
        return x.new_zeros(*x.shape[:-1], self._size).index_add_(-1, self._index.to(x.device), signed)


class SRHT:
    """Picks q columns of the Hadamard transform of the columns with random signs. It costs N n log n."""

    def __init__(self, n: int, spec: SketchSpec, generator: torch.Generator) -> None:
        self._index = torch.randint(_padded(n), (spec.size,), generator=generator)
        self._signs = _random_signs(n, generator)
        self._scale = math.sqrt(_padded(n) / spec.size)

    def __call__(self, x: Tensor) -> Tensor:
        return hadamard(x * self._signs.to(x)).index_select(-1, self._index.to(x.device)) * self._scale


# A new kind is a class with these two methods, in this table.
KINDS: dict[str, Callable[[int, SketchSpec, torch.Generator], Callable[[Tensor], Tensor]]] = {
    "uniform": Uniform,
    "gaussian": Gaussian,
    "countsketch": CountSketch,
    "srht": SRHT,
}


class Sketch:
    """A random Omega (n x q). ``sketch(x)`` is ``x @ Omega`` along the last dimension of x.

    Omega is drawn on the CPU from ``seed`` alone: it is the same on every device and rank, and after a resume.
    """

    def __init__(self, spec: SketchSpec, n: int, seed: int) -> None:
        self.spec = spec
        self._omega = KINDS[spec.kind](n, spec, torch.Generator().manual_seed(seed))

    def __call__(self, x: Tensor) -> Tensor:
        return self._omega(x)


def _random_signs(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (n,), generator=generator, dtype=torch.int8) * 2 - 1


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, padded with zeros to a power of two."""
    size, half = _padded(x.shape[-1]), 1
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs.unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return x / math.sqrt(size)


def _padded(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
