"""Where the samples are in the result of a torch function, from where they are in its arguments.

A rule takes the tracker and the function's arguments and result. It returns the location of the samples in the result,
a list of them for several results, or ``...`` where it is not known. The tracker checks that the size of the dimension
fits.

A rule says where the rows of a sample are, not that nothing else went into them. The gradients of rows add up to that
of a layer's weight, whatever made the rows. So a function that mixes samples and keeps each row in its place, as a
batch norm, a softmax or a cumulative sum over the samples does, keeps the location; one that moves rows to other
places, as a sort or a shuffle does, loses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ngplus.capture.sample_axis import (
    RULES,
    Location,
    Rule,
    SampleAxis,
    Tracker,
    agreed,
    argument,
    rule,
    tensors,
)

# ------------------------------------------------------------------------------------------------ entry by entry


@rule(
    """abs abs_ acos alpha_dropout asin atan bernoulli bfloat16 bitwise_not bool byte ceil ceil_ celu clamp clamp_
    clamp_max clamp_max_ clamp_min clamp_min_ clone conj contiguous cos cpu cuda data detach detach_ double dropout
    dropout_ dropout1d dropout2d dropout3d elu elu_ erf erfc exp exp_ exp2 expm1 feature_dropout float floor floor_
    frac gelu half hardsigmoid hardswish hardtanh hardtanh_ imag int isfinite isinf isnan leaky_relu leaky_relu_ log
    log_ log1p log2 log_sigmoid logical_not logical_not_ logit long mish nan_to_num nan_to_num_ neg neg_ negative
    pin_memory positive real reciprocal reciprocal_ relu relu_ relu6 requires_grad_ resolve_conj resolve_neg round
    round_ rrelu rsqrt rsqrt_ selu sgn short sigmoid sigmoid_ sign silu sin sinh softplus softsign sqrt sqrt_ square
    tan tanh tanh_ tanhshrink _threshold trunc __invert__

    add add_ addcdiv addcdiv_ addcmul addcmul_ atan2 bitwise_and bitwise_or bitwise_xor copysign div div_ divide eq
    float_power floor_divide fmod ge greater gt hypot isclose le lerp lerp_ less logaddexp logical_and logical_or
    logical_xor lt masked_fill masked_fill_ maximum minimum mul mul_ multiply ne pow pow_ prelu remainder rsub sub sub_
    subtract true_divide where xlogy __and__ __eq__ __floordiv__ __iand__ __ior__ __or__ __rdiv__ __rfloordiv__ __rmod__
    __rpow__ __rsub__ __xor__

    cumprod cumsum cumsum_ gumbel_softmax local_response_norm log_softmax logcumsumexp normalize softmax softmin tril
    tril_ triu triu_"""
)
def entrywise(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Functions whose entries keep their places, with broadcasting: pointwise ones, norms, cumulative sums."""
    result = next(tensors(out))
    given = list(tensors((args, kwargs)))
    if any(x.dim() > result.dim() for x in given):  # torch.where(mask)
        return ...
    found = [broadcast(tracker.of(x), x, result) for x in given]
    axes = [(x, axis) for x, axis in zip(given, found, strict=True) if isinstance(axis, SampleAxis)]
    if any(_crosses(x, axis, other, own, result, tracker.samples) for x, axis in axes for other, own in axes):
        tracker.crossed = True
    return agreed(found)


def broadcast(location: Location, x: Tensor, result: Tensor) -> Location:
    """The location of x after x was broadcast to the shape of the result."""
    if not isinstance(location, SampleAxis):
        return location
    return replace(location, dim=location.dim + result.dim() - x.dim())


def _crosses(x: Tensor, axis: SampleAxis, other: Tensor, own: SampleAxis, result: Tensor, samples: int) -> bool:
    """Is x, with its samples first, added to a tensor whose samples are elsewhere, and which has as many entries where
    those of x come? So are positions [length, d] to [samples, length, d], where both sizes are the same."""
    place = axis.dim - result.dim() + other.dim()
    return x.dim() < other.dim() and axis.dim != own.dim and place >= 0 and other.shape[place] == samples > 1


@rule("copy_")
def overwritten(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    x, source = args[0], argument(args, kwargs, 1, "other", "src")
    location = tracker.of(source)
    return tracker.of(x) if location is None else broadcast(location, source, x)


@rule(
    """empty_like full_like ones_like rand_like randint_like randn_like zeros_like
    bernoulli_ fill_ normal_ uniform_ zero_"""
)
def like(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    """The shape of a tensor, with other entries."""
    axis = tracker.of(args[0])
    return replace(axis, blank=True) if isinstance(axis, SampleAxis) else axis or ...


@rule("batch_norm group_norm instance_norm")
def norm_of_channels(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    """These have the samples along dimension 0. InstanceNorm gives [channels, length] a batch dimension."""
    axis = tracker.of(args[0])
    if axis == SampleAxis(1) and len(args[0]) == 1:
        tracker.unbatched = True
    return axis if isinstance(axis, SampleAxis) and axis.dim == 0 else ...


@rule("layer_norm native_layer_norm rms_norm")
def norm_of_features(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    x, shape = args[0], argument(args, kwargs, 1, "normalized_shape")
    axis = tracker.of(x)
    return axis if isinstance(axis, SampleAxis) and axis.dim < x.dim() - len(shape) else ...


@rule("arange empty eye full new_empty new_full new_ones new_zeros ones zeros")
def created(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """New tensors, of which a tensor gives the size, dtype or device alone."""
    return None


@rule("new_tensor")
def copied(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    return tracker.of(argument(args, kwargs, 1, "data"))


# ------------------------------------------------------------------------------------------------ shapes


@rule("flatten ravel reshape reshape_as squeeze squeeze_ unflatten unsqueeze unsqueeze_ view view_as")
def reshape(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    """The order of the entries stays. A dimension of the new shape has to hold the whole axis."""
    x = args[0]
    axis = tracker.of(x)
    if axis is None:  # the other tensor of view_as gives the size alone
        return None
    if not isinstance(axis, SampleAxis) or x.numel() != out.numel():
        return ...
    stride = axis.inner * prod(x.shape[axis.dim + 1 :])  # between two samples
    for dim, size in enumerate(out.shape):
        after = prod(out.shape[dim + 1 :])
        if after and stride % after == 0 and size % (tracker.samples * (stride // after)) == 0:
            inner = stride // after
            return SampleAxis(dim, size // (tracker.samples * inner), inner)
    return ...


def _permutation(name: str) -> Rule:
    def permute(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
        """The dimensions of a tensor in another order, found by a tensor with different sizes."""
        axis = tracker.of(args[0])
        if not isinstance(axis, SampleAxis):
            return ...
        probe = torch.empty(tuple(range(2, 2 + args[0].dim())), device="meta")
        attribute = getattr(Tensor, name)
        permuted = attribute(probe, *args[1:], **kwargs) if callable(attribute) else attribute.__get__(probe)
        return replace(axis, dim=[size - 2 for size in permuted.shape].index(axis.dim))

    return permute


for _name in [
    "H",
    "T",
    "adjoint",
    "mH",
    "mT",
    "moveaxis",
    "movedim",
    "permute",
    "swapaxes",
    "swapdims",
    "t",
    "transpose",
]:
    RULES[_name] = _permutation(_name)


@rule("broadcast_to expand expand_as")
def expand(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    axis = tracker.of(args[0])
    if axis is None:  # the other tensor of expand_as gives the size alone
        return None
    return replace(axis, dim=axis.dim + out.dim() - args[0].dim()) if isinstance(axis, SampleAxis) else ...


@rule("repeat tile")
def repeat(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    x = args[0]
    axis = tracker.of(x)
    if not isinstance(axis, SampleAxis):
        return ...
    dim = axis.dim + out.dim() - x.dim()
    return replace(axis, dim=dim, outer=axis.outer * (out.shape[dim] // x.shape[axis.dim]))


@rule("repeat_interleave")
def repeat_interleave(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    x, count, dim = args[0], argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    axis = tracker.of(x)
    if not isinstance(axis, SampleAxis) or not isinstance(count, int) or dim is None:
        return ...
    return axis if dim % x.dim() != axis.dim else replace(axis, inner=axis.inner * count)


@rule("cat concat concatenate")
def cat(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    parts = argument(args, kwargs, 0, "tensors")
    dim = argument(args, kwargs, 1, "dim", "axis", default=0) % out.dim()
    locations = [tracker.of(part) for part in parts]
    axis = agreed(locations)
    if axis is ... or axis.dim != dim:
        return axis
    if axis.inner > 1 or any(each != axis for each in locations):
        return ...
    return replace(axis, outer=axis.outer * len(parts))  # two views of the same samples, one after the other


@rule("stack")
def stack(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    parts, dim = argument(args, kwargs, 0, "tensors"), argument(args, kwargs, 1, "dim", default=0) % out.dim()
    axis = agreed(map(tracker.of, parts))
    return axis if axis is ... else replace(axis, dim=axis.dim + (dim <= axis.dim))


@rule("chunk split split_with_sizes tensor_split")
def split(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    axis, dim = tracker.of(args[0]), argument(args, kwargs, 2, "dim", default=0) % args[0].dim()
    if not isinstance(axis, SampleAxis) or dim != axis.dim:
        return axis or ...
    each, start, view = [], 0, tracker.samples * axis.inner
    for part in out:
        size = part.shape[dim]
        each.append(replace(axis, outer=size // view) if size and start % view == size % view == 0 else ...)
        start += size
    return each


@rule("select unbind")
def select(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    axis, dim = tracker.of(args[0]), argument(args, kwargs, 1, "dim", default=0) % args[0].dim()
    if not isinstance(axis, SampleAxis) or dim == axis.dim:
        return ...
    return replace(axis, dim=axis.dim - (dim < axis.dim))


@rule("narrow")
def narrow(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    return tracker.of(args[0])  # the tracker sees by the size that the samples were cut


@rule("argsort sort")
def sort(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    return _along(tracker, args[0], argument(args, kwargs, 1, "dim", default=-1))


@rule("roll topk")
def roll(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Without dimensions, roll flattens the tensor; without one, topk has the last."""
    last = None if "shifts" in kwargs or args[0].shape == next(tensors(out)).shape else -1
    return _along(tracker, args[0], argument(args, kwargs, 2, "dims", "dim", default=last))


@rule("flip")
def flip(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    dims = kwargs.get("dims", args[1:])
    return _along(tracker, args[0], dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)


@rule("fft_fft fft_ifft fft_irfft fft_rfft")
def fourier(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    return _along(tracker, args[0], argument(args, kwargs, 2, "dim", default=-1))


@rule("fft_fft2 fft_ifft2 fft_rfft2")
def fourier_of_two(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    return _along(tracker, args[0], argument(args, kwargs, 2, "dim", default=(-2, -1)))


@rule("fft_fftn fft_ifftn fft_irfftn fft_rfftn")
def fourier_of_several(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    return _along(tracker, args[0], argument(args, kwargs, 2, "dim"))


def _along(tracker: Tracker, x: Tensor, dims: Any) -> Any:
    """The location of x, if a function that moves or mixes entries along ``dims`` leaves the samples alone."""
    axis = tracker.of(x)
    return ... if not isinstance(axis, SampleAxis) or axis.dim in _dims(dims, x.dim()) else axis


@rule("pad")
def pad(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    axis, sizes = tracker.of(args[0]), argument(args, kwargs, 1, "pad")
    if not isinstance(axis, SampleAxis):
        return ...
    place = 2 * (args[0].dim() - 1 - axis.dim)  # the last dimension comes first
    return ... if any(sizes[place : place + 2]) else axis


@rule("to type type_as")
def cast(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    return tracker.of(args[0])  # another tensor among the arguments gives the dtype alone


def _dims(dim: Any, count: int) -> set[int]:
    each = range(count) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return {d % count for d in each}


@rule("all_reduce wait_tensor _wrap_tensor_autograd all_gather_into_tensor all_gather_into_tensor_autograd")
def gathered(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Any:
    """Functional collectives. Those that gather put the parts of the ranks along the first dimension."""
    x, axis = args[0], tracker.of(args[0])
    if not isinstance(axis, SampleAxis) or axis.dim > 0:
        return axis or ...
    return replace(axis, outer=axis.outer * len(out) // len(x))


RULES.update(dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_autograd"), gathered))


# ------------------------------------------------------------------------------------------------ reductions


@rule(
    "all amax amin any argmax argmin count_nonzero linalg_vector_norm logsumexp max mean median min nansum norm prod "
    "std sum var"
)
def reduction(tracker: Tracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    x, axis = args[0], tracker.of(args[0])
    if len(args) > 1 and isinstance(args[1], Tensor):  # torch.max(x, y)
        return entrywise(tracker, args, kwargs, out)
    second = len(args) > 2 and not isinstance(args[2], bool)  # norm(p, dim)
    dim = argument(args, kwargs, 2 if second else 1, "dim", "axis")
    if not isinstance(axis, SampleAxis) or dim is None:
        return ...
    reduced = _dims(dim, x.dim())
    if axis.dim in reduced:
        return ...
    kept = next(tensors(out)).dim() == x.dim()
    return axis if kept else replace(axis, dim=axis.dim - sum(d < axis.dim for d in reduced))
