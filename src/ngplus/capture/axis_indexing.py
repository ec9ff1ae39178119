"""Rules of :mod:`ngplus.capture.axis_rules` for functions that index a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ngplus.capture.axis_rules import broadcast
from ngplus.capture.sample_axis import Location, SampleAxis, Tracker, UnknownAxis, agreed, argument, rule, tensors


@rule("__getitem__")
def getitem(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    return indexed(tracker, args[0], tracker.of(args[0]), args[1])


def indexed(tracker: Tracker, x: Tensor, axis: Location, index: Any) -> Any:
    """The samples of x[index], with those of x along ``axis``."""
    entries = [torch.tensor(i) if _is_numbers(i) else i for i in (index if isinstance(index, tuple) else (index,))]
    if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in entries):
        return UnknownAxis("a mask", chosen=True)
    if any(isinstance(i, bool | list) for i in entries):
        return ...
    if not any(i is Ellipsis for i in entries):
        entries.append(Ellipsis)
    rest = x.dim() - sum(i is not None and i is not Ellipsis for i in entries)
    full: list[Any] = []
    for i in entries:
        full += [slice(None)] * rest if i is Ellipsis else [i]
    chosen = [i for i in full if isinstance(i, Tensor)]
    if len(chosen) > 1:
        found = _one_row_each(tracker, axis, full)
        return _same_of_each(tracker, x, axis, full) if found is ... else found
    dim = at = 0
    place = {}  # of each dimension of x in the result
    for i in full:
        if isinstance(i, Tensor):
            own = tracker.of(i)
            if _looked_up(tracker, axis) and isinstance(own, SampleAxis):
                return replace(own, dim=own.dim + at)
            ordered = dim == 0 if isinstance(axis, UnknownAxis) else axis is not None and dim == axis.dim
            if isinstance(own, UnknownAxis):  # rows of x, whatever made the index
                return _reordered(tracker, axis, ordered, replace(own, function="an index", chosen=False))
            if own is not None:
                return ...
            if ordered and not tracker.of_rows:
                began = axis if isinstance(axis, UnknownAxis) else UnknownAxis("__getitem__")
                return _reordered(tracker, axis, ordered, replace(began, chosen=False))
            dim, at = dim + 1, at + i.dim()
        elif isinstance(i, slice):
            whole = i.indices(x.shape[dim]) == (0, x.shape[dim], 1)
            place.update({dim: at} if whole or axis is None or dim != getattr(axis, "dim", -1) else {})
            dim, at = dim + 1, at + 1
        elif i is None:
            at += 1
        else:
            dim += 1
    return replace(axis, dim=place[axis.dim]) if isinstance(axis, SampleAxis) and axis.dim in place else ...


def _is_numbers(index: Any) -> bool:
    return isinstance(index, list) and len(index) > 0 and all(type(i) is int for i in index)


def _reordered(tracker: Tracker, axis: Location, ordered: bool, found: UnknownAxis) -> UnknownAxis:
    """Rows that an index has put into another order; an index of such rows may put them back into their own."""
    if tracker.of_rows or not ordered:
        return found
    return replace(found, moved=isinstance(axis, SampleAxis))


def _looked_up(tracker: Tracker, axis: Location) -> bool:
    """Has x[index] the places of the index? Rows may be looked up in others, as those of edges in those of nodes."""
    return axis is None or (tracker.of_rows and isinstance(axis, UnknownAxis))


def _one_row_each(tracker: Tracker, axis: Location, full: list[Any]) -> Any:
    """x[torch.arange(samples), position] takes a row of each sample."""
    first = full[0]
    if axis != SampleAxis(0) or not isinstance(first, Tensor) or not isinstance(full[1], Tensor):
        return ...
    if first.dim() != 1 or full[1].dim() != 1 or any(isinstance(i, Tensor) for i in full[2:]):
        return ...
    return axis if bool((first == torch.arange(len(first), device=first.device)).all()) else ...


def _same_of_each(tracker: Tracker, x: Tensor, axis: Location, full: list[Any]) -> Any:
    """x[:, i, j] takes the same entries of each sample. The indices, side by side, become the dimensions of one."""
    spots = [k for k, i in enumerate(full) if isinstance(i, Tensor)]
    known = all(isinstance(i, Tensor | slice) or i is None for i in full)
    if not known or len(spots) != spots[-1] - spots[0] + 1 or any(tracker.of(full[k]) is not None for k in spots):
        return ...
    dim = at = 0
    for k, i in enumerate(full):
        if isinstance(axis, SampleAxis) and i is not None and dim == axis.dim:
            whole = isinstance(i, slice) and i.indices(x.shape[dim]) == (0, x.shape[dim], 1)
            return replace(axis, dim=at) if whole else ...
        if isinstance(i, Tensor):
            at += max(full[spot].dim() for spot in spots) if k == spots[0] else 0
        else:
            at += 1
        dim += i is not None
    return ...


@rule("__setitem__")
def setitem(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """x[index] = value: a new tensor takes the samples of the value, as in x = zeros(...); x[:, 1:] = tokens. Where the
    samples of the value do not lie as those of x[index], it is no longer known where they are."""
    x, index, value = args
    held, axis = tracker.of(x), tracker.of(value)
    entries = index if isinstance(index, tuple) else (index,)
    if axis is None and (isinstance(held, SampleAxis) or not any(tracker.of(i) for i in entries)):
        return held
    if isinstance(axis, SampleAxis):
        part = x[index]
        candidates = [replace(axis, dim=dim) for dim, size in enumerate(x.shape) if size == value.shape[axis.dim]]
        for own in [held] if isinstance(held, SampleAxis) else candidates if held is None else []:
            found = indexed(tracker, x, own, index)
            if isinstance(found, SampleAxis) and found == broadcast(axis, value, part):
                return replace(own, blank=own.blank and axis.blank)
    return ...


@rule("masked_select")
def masked_select(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    return UnknownAxis("a mask", chosen=True)


@rule("masked_scatter masked_scatter_")
def masked_scatter(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    """Writes rows in their order to places that a mask gives for each sample, as the features of images to tokens."""
    axis, mask = tracker.of(args[0]), tracker.of(argument(args, kwargs, 1, "mask"))
    return axis if isinstance(axis, SampleAxis) and axis == mask and not axis.blank else ...


@rule("index_select")
def index_select(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    x, index = args[0], argument(args, kwargs, 2, "index")
    dim = argument(args, kwargs, 1, "dim") % x.dim()
    axis, own = tracker.of(x), tracker.of(index)
    if _looked_up(tracker, axis) and isinstance(own, SampleAxis):
        return replace(own, dim=dim)
    if not tracker.of_rows and (isinstance(axis, UnknownAxis) or (axis is not None and dim == axis.dim)):
        return UnknownAxis("index_select", moved=isinstance(axis, SampleAxis))
    return axis if isinstance(axis, SampleAxis) and own is None and dim != axis.dim else ...


@rule("gather take_along_dim")
def gather(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    """Picks along one dimension; in all others the places are those of the index."""
    dim = argument(args, kwargs, 1, "dim")
    dim = dim if isinstance(dim, int) else argument(args, kwargs, 2, "dim")
    axis = agreed(map(tracker.of, tensors((args, kwargs))))
    return ... if axis is ... or dim is None or axis.dim == dim % out.dim() else axis
