"""G_i of an embedding table, of which a sample uses few rows.

On the right side only ``total`` allocates a tensor of the table's size. The first refresh calls it for tables of up to
a million rows (``capture.collector``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngplus.fisher.factors.base import CHUNK, Factors, Pair, Samples
from ngplus.fisher.factors.parts import add_up
from ngplus.fisher.sketch import Sketch

INDEX_BYTES = 40  # an entry's indices and its place among the distinct ones, while these are found


@dataclass
class Lookup(Factors):
    """An embedding's G_i = sum_p e_index(ip) v_ip^T.

    ``index`` is [samples, positions], ``values`` [samples, positions, n]. On the right side the values of equal indices
    of one sample are added first; R is then one product of the sums.
    """

    index: Tensor
    values: Tensor
    rows: int

    def __post_init__(self) -> None:
        self.groups = 1
        self.samples, self.positions, self.cols = self.values.shape

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        index, values = self.index[samples], self.values[samples].to(dtype)
        out = values.new_zeros(len(values), self.rows, self.cols)
        return out.scatter_add_(1, index[..., None].expand_as(values), values)[None]

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        out = self.values.new_zeros(self.rows, self.cols, dtype=dtype)
        for index, values in zip(self.index.split(self._step), self.values.split(self._step), strict=True):
            out.index_add_(0, index.flatten(), values.to(dtype).flatten(0, 1))
        return out[None]

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        part = Lookup(self.index, self.values[..., cols], self.rows)
        squares = add_up(chunk.to(dtype).square().sum() for chunk in part.values.split(part._step))
        return part.gradient_sum(dtype)[:, rows], self.positions * squares

    @property
    def _step(self) -> int:
        """Samples whose values have about ``CHUNK`` entries."""
        return max(1, CHUNK // max(1, self.positions * self.cols))

    def _touched(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        """The nonzero rows of all G_i, [1, number of them, n]."""
        index, values = self.index[samples], self.values[samples].to(dtype)
        keys = index + self.rows * torch.arange(len(index), device=index.device)[:, None]  # of (sample, index) pairs
        unique, place = torch.unique(keys.flatten(), return_inverse=True)
        return values.new_zeros(len(unique), self.cols).index_add_(0, place, values.flatten(0, 1))[None]

    def pair(self, side: str, form: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> Pair:
        if side == "left":
            return super().pair(side, form, samples, sketch, dtype)
        touched = self._touched(samples, dtype)
        return touched, touched

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        return {"explicit": float(d * block * (self.positions if side == "right" else other))}

    def rank(self, side: str) -> int:
        return self.samples * (self.positions if side == "right" else self.cols)

    def memory(self, side: str, form: str, other: int) -> int:
        if side == "left":
            return super().memory(side, form, other)
        return self.positions * (2 * self.cols + INDEX_BYTES // 4)


@dataclass
class Bags(Factors):
    """An embedding bag's G_i = (sum_j w_j e_index(j)) g_i^T.

    ``index``, ``sample`` and ``weight`` have one entry for each entry of a bag; ``grads`` is [samples, n]. There is one
    position, so R = sum_i c_i g_i g_i^T with c_i = ||sum_j w_j e_index(j)||^2.
    """

    index: Tensor
    sample: Tensor
    weight: Tensor
    grads: Tensor
    rows: int

    def __post_init__(self) -> None:
        self.groups, self.positions = 1, 1
        self.samples, self.cols = self.grads.shape

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        chosen = torch.arange(self.samples, device=self.grads.device)[samples]
        place = torch.full((self.samples,), -1, device=chosen.device)
        place[chosen] = torch.arange(len(chosen), device=chosen.device)
        place = place[self.sample]  # of each entry's sample among the chosen ones, or -1
        used = place >= 0
        left = self.grads.new_zeros(len(chosen), self.rows, dtype=dtype)
        left.index_put_((place[used], self.index[used]), self.weight[used].to(dtype), accumulate=True)
        return (left[:, :, None] * self.grads[samples].to(dtype)[:, None, :])[None]

    def pair(self, side: str, form: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> Pair:
        if side == "left":
            return super().pair(side, form, samples, sketch, dtype)
        grads = self.grads[samples].to(dtype)
        return grads[None], (self._lengths(dtype)[samples][:, None] * grads)[None]

    def low_rank_form(self, side: str) -> str:
        return "explicit" if side == "left" else "rank-one"

    def low_rank(self, side: str, samples: Samples, dtype: torch.dtype) -> Tensor:
        if side == "left":
            return super().low_rank(side, samples, dtype)
        return (self._lengths(dtype)[samples].sqrt()[:, None] * self.grads[samples].to(dtype))[None].mT

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        out = self.grads.new_zeros(self.rows, self.cols, dtype=dtype)
        step = max(1, CHUNK // self.cols)
        for index, weight, sample in zip(*(x.split(step) for x in (self.index, self.weight, self.sample)), strict=True):
            out.index_add_(0, index, (weight[:, None] * self.grads[sample]).to(dtype))
        return out[None]

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        part = Bags(self.index, self.sample, self.weight, self.grads[:, cols], self.rows)
        return part.gradient_sum(dtype)[:, rows], (self._lengths(dtype)[:, None] * part.grads.to(dtype).square()).sum()

    def _lengths(self, dtype: torch.dtype) -> Tensor:
        """||sum_j w_j e_index(j)||^2 of each bag."""
        keys, place = torch.unique(self.sample * self.rows + self.index, return_inverse=True)
        weight = self.weight.new_zeros(len(keys), dtype=dtype).index_add_(0, place, self.weight.to(dtype))
        owner = keys.div(self.rows, rounding_mode="floor")
        return weight.new_zeros(self.samples).index_add_(0, owner, weight.square())

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        return {"rank-one": float(d * block)} if side == "right" else {"explicit": float(d * block * other)}

    def rank(self, side: str) -> int:
        return self.samples * (1 if side == "right" else self.cols)

    def memory(self, side: str, form: str, other: int) -> int:
        return 3 * self.cols if side == "right" else super().memory(side, form, other)

    @property
    def extra_bytes(self) -> int:
        return INDEX_BYTES * len(self.index)


def as_lookup(bags: Bags) -> Lookup:
    """Bags as positions, padded with zero values to the longest bag."""
    order = bags.sample.argsort(stable=True)
    sample, index, weight = bags.sample[order], bags.index[order], bags.weight[order]
    counts = torch.bincount(sample, minlength=bags.samples)
    place = torch.arange(len(sample), device=sample.device) - (counts.cumsum(0) - counts)[sample]
    longest = max(1, int(counts.max())) if len(sample) else 1
    positions = index.new_zeros(bags.samples, longest)
    weights = bags.grads.new_zeros(bags.samples, longest)
    positions[sample, place], weights[sample, place] = index, weight.to(weights.dtype)
    return Lookup(positions, weights[..., None] * bags.grads[:, None], bags.rows)
