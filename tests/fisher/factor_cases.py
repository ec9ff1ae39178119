"""Factors of every kind with their gradients by plain loops, and what the tests compare them with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.factors import (
    Bags,
    Factors,
    Joined,
    Lookup,
    OnDemand,
    Outer,
    Parts,
    Rows,
    Segments,
    SomeRows,
)

SAMPLES, ROWS, COLS = 5, 6, 4
SIDES = ("left", "right")


class Late:
    """A factor that is made when samples are asked for, as a convolution's patches are."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape = values, tuple(values.shape)

    def take(self, samples: Tensor | slice) -> Tensor:
        return self.values[:, samples].clone()

    def columns(self, cols: slice, samples: slice) -> Tensor:
        return self.values[:, samples, :, cols].clone()

    def outer(self, samples: Tensor | slice, left: Tensor, side: str, ones: bool) -> Tensor:
        right = self.take(samples).to(left.dtype)
        right = torch.cat((right, torch.ones_like(right[..., :1])), -1) if ones else right
        return (right.mT @ left if side == "left" else left.mT @ right).flatten(1, 2)

    def outer_memory(self, m: int) -> int:
        return self.shape[0] * self.shape[2] * (self.shape[3] + m + 2)

    def gram(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        taken = self.take(samples).to(dtype)
        return taken @ taken.mT

    @property
    def gram_memory(self) -> int:
        return self.shape[0] * self.shape[2] * self.shape[3]

    @property
    def gram_cost(self) -> float:
        return float(self.shape[2] ** 2 * self.shape[3])


# Each builder makes factors and, by plain loops that share no code with the package, their gradients
# [groups, samples, m, n].
Built = tuple[Factors, Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outer(kappa: int = 1, ones: bool = False, groups: int = 1, late: bool = False, seed: int = 1) -> Built:
    left = random(groups, SAMPLES, kappa, ROWS, seed=seed)
    right = random(groups, SAMPLES, kappa, COLS - ones, seed=seed + 1)
    full = torch.cat([right, torch.ones(groups, SAMPLES, kappa, 1, dtype=right.dtype)], -1) if ones else right
    dense = torch.zeros(groups, SAMPLES, ROWS, COLS, dtype=torch.float64)
    for g in range(groups):
        for i in range(SAMPLES):
            for p in range(kappa):
                dense[g, i] += torch.outer(left[g, i, p], full[g, i, p])
    return Outer(left, Late(right) if late else right, ones), dense


def lookup(kappa: int = 3, seed: int = 11) -> Built:
    index = torch.randint(ROWS, (SAMPLES, kappa), generator=torch.Generator().manual_seed(seed))
    if kappa > 1:
        index[:, 1] = index[:, 0]  # a word twice in one sample
    values = random(SAMPLES, kappa, COLS, seed=seed + 1)
    dense = torch.zeros(1, SAMPLES, ROWS, COLS, dtype=torch.float64)
    for i in range(SAMPLES):
        for p in range(kappa):
            dense[0, i, index[i, p]] += values[i, p]
    return Lookup(index, values, ROWS), dense


def bags(seed: int = 21) -> Built:
    index = torch.tensor([0, 3, 3, 5, 1, 2, 2, 2, 4])  # bag 0 has a row twice, bag 2 a row thrice, bag 3 is empty
    sample = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 4])
    weight, grads = random(len(index), seed=seed), random(SAMPLES, COLS, seed=seed + 1)
    dense = torch.zeros(1, SAMPLES, ROWS, COLS, dtype=torch.float64)
    for j, i, w in zip(index, sample, weight, strict=True):
        dense[0, i, j] += w * grads[i]
    return Bags(index, sample, weight, grads, ROWS), dense


def rows(groups: int = 1, seed: int = 31) -> Built:
    values = random(groups, SAMPLES, ROWS, COLS, seed=seed)
    return Rows(values), values.clone()


def segments(sizes: tuple[int, ...] = (3, 1, 0, 7, 2), seed: int = 41) -> Built:
    left, right = random(sum(sizes), ROWS, seed=seed), random(sum(sizes), COLS, seed=seed + 1)
    dense = torch.zeros(1, SAMPLES, ROWS, COLS, dtype=torch.float64)
    for p, i in enumerate(i for i, size in enumerate(sizes) for _ in range(size)):
        dense[0, i] += torch.outer(left[p], right[p])
    return Segments(left, right, sizes), dense


class Stored:
    """Gradients that were computed before."""

    entries = 0
    half_precision = False

    def __init__(self, dense: Tensor) -> None:
        self._dense = dense
        self.shape = (dense.shape[0], dense.shape[1], dense.shape[2], dense.shape[3])

    def take(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return self._dense[:, samples].to(dtype)

    def total(self, dtype: torch.dtype) -> Tensor:
        return self._dense.sum(1).to(dtype)


def on_demand(groups: int = 1) -> Built:
    dense = random(groups, SAMPLES, ROWS, COLS, seed=71)
    return OnDemand(Stored(dense)), dense


def some_rows() -> Built:
    """A left factor that has rows 2 to 4 alone."""
    factors, dense = outer(3, ones=True)
    assert isinstance(factors.left, Tensor)
    dense = dense.clone()
    dense[:, :, :2] = dense[:, :, 5:] = 0
    return Outer(SomeRows(factors.left[..., 2:5], 2, ROWS), factors.right, factors.ones), dense


def in_parts(made: Built) -> Built:
    """Factors that are made for some samples at a time."""
    factors, dense = made

    def build(samples: Tensor | slice) -> Factors:
        if isinstance(factors, Lookup):
            return Lookup(factors.index[samples], factors.values[samples], ROWS)
        assert isinstance(factors, Outer)
        return Outer(factors.left[:, samples], factors.right[:, samples], factors.ones)

    return Parts(build, SAMPLES, build(slice(0, 1)), 0, [*factors.tensors()], 2), dense


def joined(*uses: Built) -> Built:
    dense = uses[0][1]
    for _, more in uses[1:]:
        dense = dense + more
    return Joined([factors for factors, _ in uses]), dense


BUILDERS: dict[str, Callable[[], Built]] = {
    "outer": lambda: outer(),
    "outer-ones": lambda: outer(ones=True),
    "outer-groups": lambda: outer(groups=2),
    "outer-groups-ones": lambda: outer(groups=2, ones=True),
    "outer-3": lambda: outer(3),
    "outer-3-ones": lambda: outer(3, ones=True),
    "outer-7-ones": lambda: outer(7, ones=True),  # more positions than rows or columns
    "outer-3-groups-ones": lambda: outer(3, ones=True, groups=2),
    "late": lambda: outer(late=True),
    "late-3-ones": lambda: outer(3, ones=True, late=True),
    "late-7-groups-ones": lambda: outer(7, ones=True, groups=2, late=True),
    "lookup": lambda: lookup(),
    "lookup-1": lambda: lookup(1),
    "bags": bags,
    "rows": lambda: rows(),
    "rows-groups": lambda: rows(groups=2),
    "on demand": lambda: on_demand(),
    "on demand-groups": lambda: on_demand(2),
    "segments": lambda: segments(),
    "outer-3-some rows": some_rows,
    "parts": lambda: in_parts(outer(3, ones=True)),
    "parts-lookup": lambda: in_parts(lookup(2)),
    "parts+outer": lambda: joined(in_parts(outer(2, ones=True)), outer(3, seed=5)),
    "parts+lookup": lambda: joined(in_parts(outer(3)), lookup(2)),
    "segments+segments": lambda: joined(segments(), segments((1, 1, 4, 2, 1), seed=45)),
    "segments+outer": lambda: joined(segments(), outer(2, ones=True)),
    "outer+outer": lambda: joined(outer(), outer(2, seed=5)),
    "outer-ones+outer-ones": lambda: joined(outer(2, ones=True), outer(3, ones=True, seed=5)),
    "outer+outer-groups": lambda: joined(outer(2, groups=2), outer(2, groups=2, seed=5)),
    "outer+late": lambda: joined(outer(2, ones=True), outer(2, ones=True, late=True, seed=5)),
    "lookup+outer": lambda: joined(lookup(2), outer(3)),
    "outer-ones+lookup": lambda: joined(outer(3, ones=True), lookup(2)),
    "lookup+lookup": lambda: joined(lookup(2), lookup(3, seed=15)),
    "lookup+outer+lookup": lambda: joined(lookup(2), outer(1), lookup(3, seed=15)),
    "rows+rows": lambda: joined(rows(), rows(seed=35)),
    "rows+outer": lambda: joined(rows(), outer(3, ones=True)),
    "on demand+outer": lambda: joined(on_demand(), outer(3, ones=True)),
    "bags+outer": lambda: joined(bags(), outer(2)),
    "bags+lookup+rows": lambda: joined(bags(), lookup(), rows()),
}


@functools.cache
def built(name: str) -> Built:
    return BUILDERS[name]()


def expected_forms(name: str, side: str) -> set[str]:
    """The forms that the module's table promises."""
    if "+" in name:
        plain = all(
            part.startswith(("outer", "late", "parts")) or (part == "lookup" and side == "right")
            for part in parts(name)
        )
        return {"gram", "explicit"} if plain else {"explicit"}
    if name.startswith(("outer", "late")):
        several = {"gram", "explicit"}
        return several if any(k in name for k in ("-3", "-7")) else several | {"rank-one"}
    if name in ("segments", "parts"):
        return {"gram", "explicit"}
    return {"rank-one"} if name == "bags" and side == "right" else {"explicit"}


def parts(name: str) -> list[str]:
    return name.split("+")


CASES = [(name, side, form) for name in BUILDERS for side in SIDES for form in sorted(expected_forms(name, side))]
SUBSAMPLES = {"all": None, "some": [0, 2, 3], "one": [4]}


def plain_gfim(gradients: Tensor, side: str) -> Tensor:
    """sum_i G_i G_i^T or sum_i G_i^T G_i of [groups, samples, m, n], as [groups, d, d]."""
    return torch.einsum("gsij,gskj->gik" if side == "left" else "gsji,gsjk->gik", gradients, gradients)


def diagonal_blocks(matrix: Tensor, p: int) -> Tensor:
    """The matrix with all but its diagonal blocks of p rows set to zero; the last block may be smaller."""
    block = torch.arange(matrix.shape[-1]) // p
    return torch.where(block[:, None] == block, matrix, 0.0)


def partition_of(factors: Factors, side: str, p: int | None = None) -> BlockPartition:
    return BlockPartition.of(factors.groups, factors.curved_and_other(side)[0], p)


def close(a: Tensor, b: Tensor, rtol: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max().clamp_min(1e-300)))
