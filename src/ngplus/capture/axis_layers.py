"""Rules of :mod:`ngplus.capture.axis_rules` for layers and products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ngplus.capture.axis_rules import broadcast, reduction
from ngplus.capture.sample_axis import (
    RULES,
    Location,
    SampleAxis,
    Tracker,
    UnknownAxis,
    agreed,
    argument,
    rule,
    tensors,
)


@rule("linear")
def linear(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    axis = tracker.of(x)
    if x.dim() == 1 and axis == SampleAxis(0):
        tracker.unbatched = True
    elif isinstance(axis, SampleAxis) and axis.dim == x.dim() - 1:
        tracker.across = "a linear layer"
    elif summed_up(axis):
        tracker.across = "a linear layer after a mean"
    known = isinstance(axis, SampleAxis) and axis.dim < x.dim() - 1 and tracker.of(weight) is None
    return axis if known else ...


def summed_up(location: Location) -> bool:
    """Returns True if a sum, mean or maximum was taken over the samples."""
    return isinstance(location, UnknownAxis) and RULES.get(location.function) is reduction


@rule(
    """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d channel_shuffle fold glu grid_sample interpolate lp_pool2d
    max_pool1d max_pool2d max_pool3d one_hot pixel_shuffle pixel_unshuffle unfold"""
)
def first_dimension(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Functions that leave the first dimension of a batch alone."""
    axis = tracker.of(argument(args, kwargs, 0, "input"))
    return axis if isinstance(axis, SampleAxis) and axis.dim == 0 and next(tensors(out)).dim() > 1 else ...


@rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
def convolution(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    axis = tracker.of(x)
    if x.dim() < weight.dim():
        tracker.unbatched = tracker.unbatched or axis == SampleAxis(0)
        return ...
    if isinstance(axis, SampleAxis) and axis.dim > 0:
        tracker.across = "a convolution"
    elif summed_up(axis):
        tracker.across = "a convolution after a mean"
    return axis if isinstance(axis, SampleAxis) and axis.dim == 0 and tracker.of(weight) is None else ...


@rule("addmm baddbmm bmm matmul mm")
def matmul(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    a, b = list(tensors((args, {name: x for name, x in kwargs.items() if name != "out"})))[-2:]
    if a.dim() < 2 or b.dim() < 2:
        return ...
    found = []
    for x, summed in ((a, a.dim() - 1), (b, b.dim() - 2)):
        axis = tracker.of(x)
        if isinstance(axis, SampleAxis) and axis.dim == summed:
            return ...
        found.append(broadcast(axis, x, out))
    return agreed(found)


@rule("einsum")
def einsum(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    equation, *operands = args
    operands = list(operands[0]) if isinstance(operands[0], list | tuple) else operands
    letters, _, result = equation.replace(" ", "").partition("->")
    if not result or "." in equation:
        return ...
    found: list[Location] = []
    for own, x in zip(letters.split(","), operands, strict=True):
        axis = tracker.of(x)
        if isinstance(axis, SampleAxis):
            if own[axis.dim] not in result:
                return ...
            axis = replace(axis, dim=result.index(own[axis.dim]))
        found.append(axis)
    return agreed(found)


@rule("scaled_dot_product_attention")
def attention(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    """Queries, keys or values that are the same for all samples are broadcast."""
    if tracker.of_rows:
        query = argument(args, kwargs, 0, "query")
        return broadcast(tracker.of(query), query, out) or ...
    found = []
    for place, name in enumerate(("query", "key", "value")):
        x = argument(args, kwargs, place, name)
        axis = tracker.of(x)
        if isinstance(axis, SampleAxis) and axis.dim >= x.dim() - 2:
            tracker.across = "attention"
            return ...
        found.append(broadcast(axis, x, out))
    return agreed(found)


@rule("multi_head_attention_forward")
def multi_head_attention(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Takes [length, samples, features], also of a module with ``batch_first``."""
    given = [argument(args, kwargs, place, name) for place, name in enumerate(("query", "key", "value"))]
    found = [tracker.of(x) for x in given]
    if tracker.of_rows:
        return [found[0] or ..., *(... for _ in list(tensors(out))[1:])]
    if any(isinstance(axis, SampleAxis) and (axis.dim != 1 or given[0].dim() < 3) for axis in found):
        tracker.across = "attention"
        return ...
    return [agreed(found), *(... for _ in list(tensors(out))[1:])]


@rule("embedding_bag")
def embedding_bag(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    index, offsets = argument(args, kwargs, 0, "input"), argument(args, kwargs, 2, "offsets")
    axis = tracker.of(index)
    if offsets is None:
        return axis if isinstance(axis, SampleAxis) and axis.dim == 0 else ...
    if isinstance(axis, SampleAxis) and tracker.of(offsets) is None:
        each = len(index) // len(out)  # entries of a bag, if all have as many
        starts = torch.arange(0, len(index), max(1, each), device=offsets.device)
        known = axis.inner % max(1, each) == 0 and torch.equal(starts, offsets[: len(starts)])
        return replace(axis, inner=axis.inner // each) if known else ...
    if argument(args, kwargs, 9, "include_last_offset") and len(offsets) == tracker.samples + 1:
        return SampleAxis(0)
    return tracker.of(offsets) or ...


@rule("bilinear")
def bilinear(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    axis = agreed(map(tracker.of, args[:2]))
    known = axis is not ... and axis.dim < out.dim() - 1 and tracker.of(argument(args, kwargs, 2, "weight")) is None
    return axis if known else ...


@rule("embedding")
def embedding(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Of a table that depends on the samples, it is not known."""
    table = tracker.of(argument(args, kwargs, 1, "weight"))
    return ... if table and not tracker.of_rows else tracker.of(argument(args, kwargs, 0, "input"))


@rule("gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell")
def cell(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    axis = tracker.of(args[0])
    return axis if isinstance(axis, SampleAxis) and axis.dim < args[0].dim() - 1 else ...


@rule("gru lstm rnn_relu rnn_tanh")
def recurrent(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """The output has the dimensions of the input; the states are [layers, samples, features]."""
    axis = tracker.of(args[0])
    batch_first = args[-1]  # with packed sequences, the direction
    if not isinstance(axis, SampleAxis) or args[0].dim() != 3:
        return ...
    if axis.dim != (0 if batch_first else 1):
        tracker.across = "a recurrent layer"
        return ...
    return [axis, *(replace(axis, dim=1) for _ in list(tensors(out))[1:])]
