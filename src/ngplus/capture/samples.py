"""Which rows of a tensor belong to which sample.

As a rule dimension 0 is the batch, with one or several rows for each sample. In graph networks and with packed
sequences samples have unlike numbers of rows: there an index tells, and the samples are filled up with rows of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

EACH, BEYOND = 16, 1000  # samples for each row, and beyond: more are hardly the batch's own, counted from 0


class Ragged:
    """Rows of samples that need not have as many: row p is one of sample ``index[p]``."""

    def __init__(self, index: Tensor, samples: int) -> None:
        self.index, self.samples = index, samples
        self._counts = torch.bincount(index, minlength=samples)
        self.sizes: list[int] = self._counts.tolist()
        self.longest = max(self.sizes)
        self._order = None if bool((index[1:] >= index[:-1]).all()) else index.argsort(stable=True)
        self.used = False  # has a layer had as many rows?

    @property
    def uneven(self) -> bool:
        """Has one sample more rows than another?"""
        return self.samples * self.longest > len(self.index)

    def pad(self, x: Tensor) -> Tensor:
        """[rows, ...] to [samples, longest, ...], with zeros where a sample has fewer rows."""
        self.used = True
        if self._order is not None or self.uneven:
            # Picking rows takes half of the time of putting them in their places.
            x = torch.cat((x, x.new_zeros(1, *x.shape[1:]))).index_select(0, self._sources.to(x.device))
        return x.unflatten(0, (self.samples, self.longest))

    def sort(self, x: Tensor) -> Tensor:
        """[rows, ...], the rows of one sample after those of the other."""
        self.used = True
        return x if self._order is None else x.index_select(0, self._order.to(x.device))

    def sums(self, x: Tensor) -> Tensor:
        """[rows, ...] to [samples, ...]."""
        self.used = True
        return x.new_zeros(self.samples, *x.shape[1:]).index_add_(0, self.index.to(x.device), x)

    @cached_property
    def _sources(self) -> Tensor:
        """The row that goes to each of the places of ``pad``; the one after the last where there is none."""
        first = (self._counts.cumsum(0) - self._counts)[:, None]
        rank = torch.arange(self.longest, device=self.index.device)
        own = first + rank if self._order is None else F.pad(self._order, (0, self.longest))[first + rank]
        return own.masked_fill_(rank >= self._counts[:, None], len(self.index)).flatten()


def ragged_rows(given: Tensor | Iterable[Tensor] | None) -> dict[int, Ragged]:
    """By the number of rows, what ``sample_index`` has returned, and one row for each sample. Of several that have as
    many and say otherwise none is taken, but for that last one."""
    each = [] if given is None else [given] if isinstance(given, Tensor) else list(given)
    for index in each:
        whole = isinstance(index, Tensor) and not (index.is_floating_point() or index.is_complex())
        if not whole or index.dim() != 1 or index.dtype == torch.bool:
            found = f"a tensor of {index.dtype}, {list(index.shape)}" if isinstance(index, Tensor) else repr(index)
            raise ValueError(
                f"Invalid sample_index: it gave {found} (the sample of each row, whole numbers in one dimension; one "
                "such tensor, or several)"
            )
    empty = [index for index in each if len(index) == 0]
    each = [index for index in each if len(index)]
    if not each:
        return {}
    each = [index.detach().to(each[0].device, torch.long) for index in each]
    smallest, largest = min(int(index.min()) for index in each), max(int(index.max()) for index in each)
    known = max(len(index) for index in each)
    if smallest < 0 or largest >= EACH * known + BEYOND:
        raise ValueError(
            f"Invalid sample_index: it gave sample {smallest if smallest < 0 else largest} for {known} rows (the "
            "samples of a batch are counted from 0; where few have rows, return torch.arange(samples) as well)"
        )
    alone = torch.arange(largest + 1, device=each[0].device)
    rows: dict[int, Ragged] = {}
    unlike = set()
    for index in (alone, *each, *(alone[:0] for _ in empty)):
        if len(index) not in rows:
            rows[len(index)] = Ragged(index, largest + 1)
        elif not torch.equal(rows[len(index)].index, index):
            unlike.add(len(index))
    return {length: ragged for length, ragged in rows.items() if length not in unlike or length == len(alone)}


@dataclass(frozen=True)
class Batch:
    """Where a layer's samples are: the dimension ``dim`` (None: the layer has no batch dimension), ``size`` the number
    of samples that the model was called with, where that is known. ``rows``: by the length of that dimension, which of
    its rows are of which sample, where the user has told.

    Examples:
        >>> batch = ngplus.layers.Batch(dim=1)
        >>> tuple(batch.fold(torch.zeros(7, 4, 5)).shape)  # time first: 4 samples of 7 positions with 5 features
        (4, 7, 5)
    """

    dim: int | None = 0
    size: int | None = None
    rows: Mapping[int, Ragged] = field(default_factory=dict, repr=False, compare=False)

    def count(self, length: int) -> int:
        """Samples in a dimension of this length.

        A layer that sees k rows for each sample, in sample-major order as after ``flatten(0, 1)``, has them folded
        into positions. With any other length, or where ``rows`` tells of others, each row counts as a sample of its
        own.
        """
        if self.dim is None:
            return 1
        if self.rows:
            return self.rows[length].samples if length in self.rows else length
        if self.dim == 0 and self.size and length % self.size == 0:
            return self.size
        return length

    def by_sample(self, x: Tensor) -> Tensor:
        """Dimension 0, [rows, ...], to [samples, rows of each, ...]; of samples with fewer rows, the others are zero.

        Examples:
            >>> tuple(ngplus.layers.Batch(size=4).by_sample(torch.zeros(12, 5)).shape)
            (4, 3, 5)
        """
        if self.dim is not None and len(x) in self.rows:
            return self.rows[len(x)].pad(x)
        return x.unflatten(0, (self.count(len(x)), -1))

    def sums(self, x: Tensor) -> Tensor:
        """Dimension 0, [rows, ...], to the sums over the rows of each sample, [samples, ...].

        Examples:
            >>> tuple(ngplus.layers.Batch(size=4).sums(torch.zeros(12, 5)).shape)
            (4, 5)
        """
        if self.dim is not None and len(x) in self.rows:
            return self.rows[len(x)].sums(x)
        return self.by_sample(x).sum(1)

    def fold(self, x: Tensor, features: int = 1) -> Tensor:
        """Any tensor with ``features`` trailing feature dimensions to [samples, positions, *features]."""
        tail = x.shape[x.dim() - features :]
        if self.dim is None or x.dim() == features:
            return x.reshape(1, -1, *tail)
        x = self.by_sample(self.first(x, features))
        return x.reshape(len(x), -1, *tail)

    def first(self, x: Tensor, features: int = 1) -> Tensor:
        """The same tensor with the batch dimension first."""
        if self.dim is not None and 0 < self.dim < x.dim() - features:
            return x.movedim(self.dim, 0)
        return x  # or what stood before the samples is gone, as of a last state

    def ragged(self, x: Tensor) -> Ragged | None:
        """Which rows of a tensor with one feature dimension are of which sample, where the user has told."""
        return None if self.dim is None or x.dim() == 1 else self.rows.get(len(self.first(x)))
