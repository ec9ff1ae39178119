"""Random sketches: matrices Omega (n x q), q << n, with E[Omega Omega^T] = I.

A sketch approximates a product, G G^T ~ (G Omega)(G Omega)^T, and reduces the number of equations of the least-squares
problem in :mod:`ngplus.fisher.inverses`. The paper samples columns uniformly, and mentions other sketches without
naming them; the Gaussian, CountSketch and SRHT (subsampled randomized Hadamard transform) kinds stand for these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("uniform", "gaussian", "countsketch", "srht")


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


class Sketch:
    """A random Omega (n x q). ``sketch(x)`` is ``x @ Omega`` along the last dimension of x.

    Omega is drawn on the CPU from ``seed`` alone: it is the same on every device and rank, and after a resume.

    Cost for x with N rows: uniform N q, gaussian N n q, countsketch N n, srht N n log n.
    """

    def __init__(self, spec: SketchSpec, n: int, seed: int) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        q = spec.size
        self._index: Tensor | None = None
        self._signs: Tensor | None = None
        self._dense: Tensor | None = None
        if spec.kind == "gaussian":
            self._dense = torch.randn(n, q, generator=generator, dtype=torch.float64) / math.sqrt(q)
            return
        # Uniform sampling picks among n columns, SRHT among those of the transform, padded to a power of two.
        population = _padded(n) if spec.kind == "srht" else n
        if spec.kind == "countsketch":
            self._index = torch.randint(q, (n,), generator=generator)
        elif spec.kind == "uniform" and not spec.replacement:
            if q > n:
                raise ValueError(
                    f"Invalid sketch size: {q} of {n} columns without replacement (at most {n}, or replacement=True)"
                )
            self._index = torch.randperm(n, generator=generator)[:q]
        else:
            self._index = torch.randint(population, (q,), generator=generator)
        if spec.kind != "uniform":
            self._signs = torch.randint(2, (n,), generator=generator, dtype=torch.int8) * 2 - 1
        self._scale = math.sqrt(population / q)

    def __call__(self, x: Tensor) -> Tensor:
        if self._dense is not None:
            return x @ self._dense.to(x)
        assert self._index is not None
        index = self._index.to(x.device)
        if self._signs is None:
            return x.index_select(-1, index) * self._scale
        signed = x * self._signs.to(x)
        if self.spec.kind == "countsketch":
            return x.new_zeros(*x.shape[:-1], self.spec.size).index_add_(-1, index, signed)
        return hadamard(signed).index_select(-1, index) * self._scale


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
