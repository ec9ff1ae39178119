"""The user's ``sample_index``: for samples with different numbers of entries, as in graphs and packed sequences.

``sample_index(*inputs)`` returns the sample of each entry along the batch dimension, as one tensor or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngplus.fisher.factors.base import Samples

SampleIndex = Callable[..., Tensor | Sequence[Tensor] | None]  # of the model's inputs

# The largest valid sample number is SAMPLES_PER_ROW times the number of entries, plus EXTRA_SAMPLES. A larger one is
# most likely not counted from 0 within the batch.
SAMPLES_PER_ROW, EXTRA_SAMPLES = 16, 1000
MAX_UNREAD = 64  # indices of as many calls are remembered until a step reads whether a layer used them


class Ragged:
    """Samples with different numbers of entries: entry p belongs to sample ``index[p]``."""

    def __init__(self, index: Tensor, samples: int) -> None:
        self.index, self.samples = index, samples
        self._counts = torch.bincount(index, minlength=samples)
        self.sizes: list[int] = self._counts.tolist()
        self.longest = max(1, *self.sizes)
        self._order = None if bool((index[1:] >= index[:-1]).all()) else index.argsort(stable=True)
        self.used = False  # has a layer had as many entries?

    @property
    def uneven(self) -> bool:
        """Whether samples have different numbers of entries."""
        return self.samples * self.longest > len(self.index)

    @property
    def shuffled(self) -> bool:
        """Whether the entries are in another order than the samples."""
        return self._order is not None

    def part(self, samples: Samples) -> tuple[Tensor, Ragged]:
        """Returns the entries of some samples, and their index."""
        self.used = True
        chosen = torch.arange(self.samples, device=self.index.device)[samples]
        sizes = self._counts[chosen]
        owner = torch.arange(len(chosen), device=chosen.device).repeat_interleave(sizes)
        starts = (self._counts.cumsum(0) - self._counts)[chosen] - (sizes.cumsum(0) - sizes)
        entries = torch.arange(len(owner), device=owner.device) + starts[owner]
        return entries if self._order is None else self._order[entries], Ragged(owner, len(chosen))

    def pad(self, x: Tensor) -> Tensor:
        """[entries, ...] to [samples, longest, ...], filled with zeros."""
        self.used = True
        if self._order is not None or self.uneven:
            x = torch.cat((x, x.new_zeros(1, *x.shape[1:]))).index_select(0, self._sources.to(x.device))
        return x.unflatten(0, (self.samples, self.longest))

    def sort(self, x: Tensor) -> Tensor:
        """[entries, ...] in the order of the samples."""
        self.used = True
        return x if self._order is None else x.index_select(0, self._order.to(x.device))

    def sums(self, x: Tensor) -> Tensor:
        """[entries, ...] to [samples, ...]."""
        self.used = True
        return x.new_zeros(self.samples, *x.shape[1:]).index_add_(0, self.index.to(x.device), x)

    @cached_property
    def _sources(self) -> Tensor:
        """The entry for each place of ``pad``; len(index), which is a zero there, for an empty place."""
        first = (self._counts.cumsum(0) - self._counts)[:, None]
        rank = torch.arange(self.longest, device=self.index.device)
        own = first + rank if self._order is None else F.pad(self._order, (0, self.longest))[first + rank]
        return own.masked_fill_(rank >= self._counts[:, None], len(self.index)).flatten()


def parse_sample_index(given: Tensor | Iterable[Tensor] | None) -> dict[int, Ragged]:
    """Checks what ``sample_index`` returned, and returns it by length, with one entry for each sample added.

    Of several indices with the same length that differ, none is taken, except the one of one entry for each sample.
    """
    indices = [] if given is None else [given] if isinstance(given, Tensor) else list(given)
    for index in indices:
        whole = isinstance(index, Tensor) and not (index.is_floating_point() or index.is_complex())
        if not whole or index.dim() != 1 or index.dtype == torch.bool:
            found = f"a tensor of {index.dtype}, {list(index.shape)}" if isinstance(index, Tensor) else repr(index)
            raise ValueError(
                f"Invalid sample_index: it returned {found} (one or several integer tensors of one dimension, with the "
                "sample of each row)"
            )
    filled = [index for index in indices if len(index)]
    if not filled:
        return {}
    filled = [index.detach().to(filled[0].device, torch.long) for index in filled]
    smallest, largest = min(int(index.min()) for index in filled), max(int(index.max()) for index in filled)
    known = max(len(index) for index in filled)
    if smallest < 0 or largest >= SAMPLES_PER_ROW * known + EXTRA_SAMPLES:
        raise ValueError(
            f"Invalid sample_index: it returned sample {smallest if smallest < 0 else largest} for {known} rows (the "
            "samples of a batch are counted from 0; if few have rows, return torch.arange(samples), too)"
        )
    each = torch.arange(largest + 1, device=filled[0].device)
    empty = [each[:0]] if len(filled) < len(indices) else []
    by_length: dict[int, Ragged] = {}
    ambiguous = set()
    for index in (each, *filled, *empty):
        if len(index) not in by_length:
            by_length[len(index)] = Ragged(index, largest + 1)
        elif not torch.equal(by_length[len(index)].index, index):
            ambiguous.add(len(index))
    return {k: ragged for k, ragged in by_length.items() if k not in ambiguous or k == len(each)}


class SampleIndexReader:
    """Calls ``sample_index`` for each call of the model, and warns once if no layer could use what it returned."""

    def __init__(self, sample_index: SampleIndex | None) -> None:
        self._sample_index, self.given = sample_index, sample_index is not None
        self._unread: list[Ragged] = []  # returned since the last step
        self._part = ""  # the class of a model of which a part was called directly
        self._done = sample_index is None  # warned already, or no warning is needed

    @torch.no_grad()
    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Ragged]:
        """Returns the indices, by their length, for a call of the model with these inputs."""
        found = {} if self._sample_index is None else parse_sample_index(self._sample_index(*args, **kwargs))
        several = [ragged for length, ragged in found.items() if length not in (0, ragged.samples)]
        self._unread = [*self._unread, *several][-MAX_UNREAD:]
        return found

    def note_part(self, model: nn.Module | None) -> None:
        """A part of the model was called directly, so ``sample_index`` was not."""
        self._part = type(model).__name__

    def complaint(self) -> str:
        """Returns the text of the warning at a step; "" for none."""
        unread, part, self._unread, self._part = self._unread, self._part, [], ""
        done = self._done or any(ragged.used for ragged in unread)
        self._done = done or bool(unread or part)
        if done:
            return ""
        if unread:
            found = " and of ".join(str(length) for length in sorted({len(ragged.index) for ragged in unread}))
            return (
                f"sample_index returned {found} entries, but no layer's batch dimension has that length (see "
                "batch_dim). Mini-batch curvature is used"
            )
        if part:
            return (
                f"A part of {part} was called by itself, and sample_index is called with the inputs of the whole "
                "model. Mini-batch curvature is used for that part"
            )
        return ""
