"""Calls of every torch function that the tracker of samples has a rule for.

Each takes x, of shape [3, 4, 5] unless another is given, with entries between 0.1 and 0.9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE = (3, 4, 5)


@dataclass(frozen=True)
class Call:
    function: Callable[[Tensor], Any]
    shape: tuple[int, ...] = SHAPE


CALLS: dict[str, list[Call]] = {}
#: Functions that mix entries and keep the place of each row.
_MIXING = """batch_norm cumprod cumsum cumsum_ group_norm gumbel_softmax instance_norm layer_norm local_response_norm
    log_softmax logcumsumexp native_layer_norm normalize rms_norm softmax softmin gru_cell lstm_cell rnn_relu_cell
    rnn_tanh_cell masked_scatter masked_scatter_"""
MIXING = set(_MIXING.split())
_OF_RANKS = """all_gather_into_tensor all_gather_into_tensor_autograd all_reduce reduce_scatter_tensor
    reduce_scatter_tensor_autograd wait_tensor _wrap_tensor_autograd"""
#: Why a name has no call here.
ELSEWHERE = {
    "cuda": "needs an accelerator",
    "pin_memory": "needs an accelerator",
    **dict.fromkeys(_OF_RANKS.split(), "needs ranks: tests/distributed"),
}


def calls(names: str, *functions: Callable[..., Any], shape: tuple[int, ...] = SHAPE) -> None:
    """Adds calls of functions that have these names. An argument f is the function of that name."""
    for name in names.split():
        for function in functions:
            two = function.__code__.co_varnames[0] == "f"
            CALLS.setdefault(name, []).append(Call(partial(function, of(name)) if two else function, shape))


def of(name: str) -> Callable[..., Any]:
    """The function of a name: a method, or one of torch or torch.nn.functional."""
    for owner in (Tensor, torch, F):
        if callable(function := getattr(owner, name, None)):
            return function
    raise AssertionError(f"torch has no function {name!r}: leave its rule out")


def whole(x: Tensor) -> Tensor:
    return (x * 10).long()


def same(*shape: int) -> Tensor:
    """The same for all samples."""
    return torch.linspace(0.2, 0.8, torch.Size(shape).numel()).view(shape)


INDEX = torch.tensor([1, 0, 1])
MASK = torch.tensor([True, False, True, True, False])

# ------------------------------------------------------------------------------------------------ entry by entry

calls(
    """abs abs_ acos asin atan bernoulli bernoulli_ bfloat16 bool byte ceil ceil_ celu clone conj contiguous cos cpu
    detach detach_ double elu elu_ erf erfc exp exp2 exp_ expm1 float floor floor_ frac gelu half hardsigmoid
    hardswish hardtanh hardtanh_ int isfinite isinf isnan leaky_relu leaky_relu_ log log1p log2 log_ logical_not
    logical_not_ logit long mish nan_to_num nan_to_num_ neg neg_ negative normal_ ones_like positive
    rand_like randn_like reciprocal reciprocal_ relu relu6 relu_ requires_grad_ resolve_conj resolve_neg round round_
    rrelu rsqrt rsqrt_ selu sgn short sigmoid sigmoid_ sign silu sin sinh softplus softsign sqrt sqrt_ square tan tanh
    tanh_ tanhshrink tril tril_ triu triu_ trunc uniform_ zero_ zeros_like """,
    lambda f, x: f(x.clone()),
)
calls("dropout alpha_dropout dropout1d dropout2d dropout3d", lambda f, x: f(x, 0.4, True))
calls("feature_dropout dropout_", lambda f, x: f(x.clone(), 0.4, True))
calls("dropout3d", lambda x: F.dropout3d(x[..., None, None], 0.4, True))
calls("data", lambda x: x.data)
calls("empty_like", lambda x: torch.empty_like(x).zero_())
calls("full_like fill_", lambda f, x: f(x.clone(), 2.0))
calls("randint_like", lambda x: torch.randint_like(x, 5))
calls("clamp clamp_", lambda f, x: f(x.clone(), 0.3, 0.6))
calls("clamp_max clamp_max_ clamp_min clamp_min_", lambda f, x: f(x.clone(), 0.5))
calls("_threshold", lambda x: F.threshold(x, 0.5, 0.0))
calls("log_sigmoid", lambda x: F.logsigmoid(x))
calls("bitwise_not __invert__", lambda f, x: f(whole(x)))
calls(
    """add add_ atan2 copy_ copysign div div_ divide eq float_power floor_divide fmod ge greater gt hypot isclose le
    less logaddexp logical_and logical_or logical_xor lt maximum minimum mul mul_ multiply ne pow pow_ remainder rsub
    sub sub_ subtract true_divide xlogy __eq__ __floordiv__ __rdiv__ __rfloordiv__ __rmod__ __rpow__ __rsub__""",
    lambda f, x: f(x.clone(), same(5)),
    lambda f, x: f(x.clone(), x * 0.5),
    lambda f, x: f(same(*x.shape), x),
)
calls("add sub mul div maximum eq", lambda f, x: f(same(2, 1, 1, 5), x))
calls(
    "bitwise_and bitwise_or bitwise_xor __and__ __iand__ __ior__ __or__ __xor__",
    lambda f, x: f(whole(x), torch.tensor([1, 2, 3, 4, 5])),
    lambda f, x: f(whole(same(*x.shape)), whole(x)),
)
calls("prelu", lambda x: F.prelu(x, same(4)), lambda x: F.prelu(x - 0.5, same(1)))
calls("addcdiv addcdiv_ addcmul addcmul_", lambda f, x: f(x.clone(), same(5), x), lambda f, x: f(same(*x.shape), x, x))
calls("lerp lerp_", lambda f, x: f(x.clone(), same(*x.shape), 0.3), lambda f, x: f(same(*x.shape), x, 0.3))
calls("masked_fill masked_fill_", lambda f, x: f(x.clone(), MASK, 0.0), lambda f, x: f(same(*x.shape), x > 0.5, 0.0))
calls("where", lambda x: torch.where(x > 0.5, x, same(5)), lambda x: torch.where(MASK, same(5), x),
      lambda x: torch.where(x > 2.0))  # fmt: skip
calls("add_ mul_ masked_fill_", lambda x: _views(x))


def _views(x: Tensor) -> Tensor:
    """In place on a view: what it is a view of changes too."""
    base = torch.zeros(2, *x.shape)
    base[0].add_(x)
    base[1].mul_(x)
    base[1].masked_fill_(x > 0.5, 1.0)
    return base


calls("batch_norm", lambda x: F.batch_norm(x, None, None, training=True))
calls("batch_norm", lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)))
calls("instance_norm", lambda x: F.instance_norm(x))
calls("group_norm", lambda x: F.group_norm(x, 2))
calls("layer_norm rms_norm", lambda f, x: f(x, (5,)), lambda f, x: f(x, (4, 5)))
calls("native_layer_norm", lambda x: torch.native_layer_norm(x, [5], None, None, 1e-5))
calls("local_response_norm", lambda x: F.local_response_norm(x, 2))
calls("normalize softmax log_softmax softmin gumbel_softmax",
      lambda f, x: f(x, dim=-1), lambda f, x: f(x, dim=0))  # fmt: skip
calls("cumsum cumsum_ cumprod logcumsumexp", lambda f, x: f(x.clone(), 0), lambda f, x: f(x.clone(), dim=1))

# ------------------------------------------------------------------------------------------------ new tensors

calls("new_empty", lambda x: x.new_empty(3, 4).zero_())
calls("new_ones new_zeros", lambda f, x: f(x, (3, 4)))
calls("new_full", lambda x: x.new_full((3, 4), 2.0))
calls("new_tensor", lambda x: x.new_tensor(same(4, 5)), lambda x: same(3).new_tensor(x))
calls("arange", lambda x: torch.arange(4, device=x.device), lambda x: torch.arange(4, out=torch.empty(4)))
calls("empty", lambda x: torch.empty(4, dtype=x.dtype).zero_())
calls("eye ones zeros", lambda f, x: f(4, dtype=x.dtype))
calls("full", lambda x: torch.full((4,), 2.0, dtype=x.dtype))

# ------------------------------------------------------------------------------------------------ shapes

calls("flatten", lambda x: x.flatten(), lambda x: x.flatten(0, 1), lambda x: x.flatten(1), lambda x: x.mT.flatten(1))
calls("ravel", lambda x: x.ravel())
calls("reshape", lambda x: x.reshape(4, 15), lambda x: x.reshape(-1, 5), lambda x: x.reshape(3, 2, 2, 5),
      lambda x: x.reshape(5, 12), lambda x: x.reshape(1, 60), lambda x: x.permute(1, 0, 2).reshape(6, 10))  # fmt: skip
calls("view", lambda x: x.view(12, 5), lambda x: x.view(3, 20), lambda x: x.view(torch.int64), lambda x: x.view(6, 10))
calls("view_as reshape_as", lambda f, x: f(x, same(12, 5)), lambda f, x: f(same(60), x))
calls("unflatten", lambda x: x.unflatten(1, (2, 2)), lambda x: x.flatten(0, 1).unflatten(0, (3, 4)),
      lambda x: x.flatten(0, 1).unflatten(0, (4, 3)))  # fmt: skip
calls("unsqueeze", lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(-1))
calls("unsqueeze_", lambda x: x.clone().unsqueeze_(1))
calls("squeeze", lambda x: x[:, None].squeeze(1), lambda x: x[None].squeeze())
calls("squeeze_", lambda x: x[:, None].clone().squeeze_(1))
calls("permute", lambda x: x.permute(2, 0, 1), lambda x: torch.permute(x, (1, 2, 0)))
calls("transpose swapaxes swapdims", lambda f, x: f(x, 0, 1), lambda f, x: f(x, -1, 0))
calls("movedim moveaxis", lambda f, x: f(x, 0, -1), lambda f, x: f(x, (0, 1), (1, 2)))
calls("T", lambda x: x[:, 0].T, lambda x: x[0].T)
calls("H", lambda x: x[:, 0].H, lambda x: x[0].H)
calls("t", lambda x: x[:, 0].t(), lambda x: x[0].t())
calls("mT", lambda x: x.mT)
calls("mH", lambda x: x.mH)
calls("adjoint", lambda x: x.adjoint())
calls("expand", lambda x: x.expand(2, 3, 4, 5), lambda x: x[:, None].expand(-1, 3, -1, -1),
      lambda x: x[:, :1].expand(-1, 4, -1))  # fmt: skip
calls("broadcast_to", lambda x: x.broadcast_to(2, 3, 4, 5), lambda x: x[:1].broadcast_to(3, 4, 5))
calls("expand_as", lambda x: x.expand_as(same(2, 3, 4, 5)), lambda x: same(5).expand_as(x))
calls("repeat", lambda x: x.repeat(2, 3, 1), lambda x: x.repeat(2, 1, 1, 1))
calls("tile", lambda x: x.tile(2), lambda x: x.tile(2, 1, 3), lambda x: torch.tile(x, (3, 1, 1, 1)))
calls("repeat_interleave", lambda x: x.repeat_interleave(2, dim=0), lambda x: x.repeat_interleave(3, 1),
      lambda x: x.repeat_interleave(2), lambda x: x.repeat_interleave(torch.tensor([1, 2, 0]), dim=0))  # fmt: skip
calls("cat concat concatenate", lambda f, x: f([x, x * 2]), lambda f, x: f([x, same(3, 2, 5)], dim=1),
      lambda f, x: f((x, same(3, 4, 5)), 0), lambda f, x: f([same(3, 4, 1), x], -1),
      lambda f, x: f([x[:2], x[2:]]), lambda f, x: f([x, x[1:]]))  # fmt: skip
CALLS["cat"].append(Call(lambda x: torch.cat(tensors=[x, x], dim=0)))
calls("stack", lambda x: torch.stack([x, x * 2]), lambda x: torch.stack([x, same(3, 4, 5)], -1),
      lambda x: torch.stack([x, x, x], dim=1), lambda x: torch.stack([x[2], x[0], x[1]]))  # fmt: skip
calls("chunk", lambda x: x.chunk(2, 1), lambda x: x.chunk(3), lambda x: torch.cat([x, x]).chunk(2))
calls("split", lambda x: x.split(2, 1), lambda x: x.split([1, 2]), lambda x: torch.cat([x] * 3).split([2, 3, 4]),
      lambda x: torch.cat([x] * 3).split([3, 6]), lambda x: x.repeat_interleave(3, 0).split(3),
      lambda x: torch.cat([x] * 4).split([6, 3, 3]))  # fmt: skip
calls("split_with_sizes", lambda x: x.split_with_sizes([1, 3], 1), lambda x: x.split_with_sizes([1, 2]))
calls("tensor_split", lambda x: x.tensor_split(2, 1), lambda x: x.tensor_split((1, 2)))
calls("select", lambda x: x.select(1, 2), lambda x: torch.select(x, 0, 1), lambda x: x.select(-1, 0))
calls("unbind", lambda x: x.unbind(1), lambda x: x.unbind(), lambda x: x.unbind(-1))
calls("narrow", lambda x: x.narrow(1, 1, 2), lambda x: x.narrow(0, 1, 2), lambda x: torch.cat([x, x]).narrow(0, 2, 3))
calls("sort argsort", lambda f, x: f(x), lambda f, x: f(x, 0), lambda f, x: f(x, dim=1, descending=True))
CALLS["sort"].append(Call(lambda x: x.sort(0, True)))
calls("roll", lambda x: x.roll(1, 1), lambda x: x.roll(2), lambda x: x.roll((1, 1), (0, 2)),
      lambda x: torch.roll(x, shifts=1, dims=-1))  # fmt: skip
calls("topk", lambda x: x.topk(2), lambda x: x.topk(3, 0), lambda x: x.topk(5), lambda x: torch.topk(x, k=4, dim=1))
calls("flip", lambda x: x.flip(1), lambda x: x.flip(0, 2), lambda x: torch.flip(x, [0]), lambda x: x.flip(dims=(-1,)))
for _name in ("fft_fft", "fft_ifft", "fft_rfft"):
    _transform = getattr(torch.fft, _name[4:])
    calls(_name, lambda x, f=_transform: f(x), lambda x, f=_transform: f(x, dim=0), lambda x, f=_transform: f(x, 4, 1))
calls("real", lambda x: (x + 0j).real)
calls("imag", lambda x: (1j * x).imag)
calls("fft_irfft", lambda x: torch.fft.irfft(x + 0j), lambda x: torch.fft.irfft(x + 0j, dim=0))
for _name in ("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_fftn", "fft_ifftn", "fft_rfftn"):
    _transform = getattr(torch.fft, _name[4:])
    calls(_name, lambda x, f=_transform: f(x), lambda x, f=_transform: f(x, dim=(1, 2)))
calls("fft_irfftn", lambda x: torch.fft.irfftn(x + 0j), lambda x: torch.fft.irfftn(x + 0j, dim=(0, 1)))
calls("pad", lambda x: F.pad(x, (1, 1)), lambda x: F.pad(x, (0, 0, 1, 0)), lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
      lambda x: F.pad(x, (1, 1), mode="circular"), lambda x: F.pad(input=x, pad=(0, 1)))  # fmt: skip
calls("to", lambda x: x.to(torch.float32), lambda x: same(3, 4, 5).to(x.float()), lambda x: x.to(same(4).float()))
calls("type", lambda x: x.type(torch.float32))
calls("type_as", lambda x: x.type_as(same(1).float()), lambda x: same(3, 4, 5).float().type_as(x))

# ------------------------------------------------------------------------------------------------ reductions

calls(
    "all amax amin any argmax argmin count_nonzero logsumexp max mean median min nansum norm prod std sum var",
    lambda f, x: f(x, dim=1),
    lambda f, x: f(x, dim=0),
    lambda f, x: f(x, dim=-1),
)
calls("all amax amin any argmax argmin max mean median min nansum prod std sum var", lambda f, x: f(x))
calls("amax amin logsumexp mean nansum std sum var norm", lambda f, x: f(x, dim=(0, 2)), lambda f, x: f(x, dim=(1, 2)))
calls("amax logsumexp max mean median nansum prod sum argmax any all std var",
      lambda f, x: f(x, 1), lambda f, x: f(x, 0, keepdim=True), lambda f, x: f(x, 1, keepdim=True))  # fmt: skip
calls("sum mean std var", lambda f, x: f(x, 2, True), lambda f, x: f(x.mT, 1))
calls("max min", lambda f, x: f(x, same(5)), lambda f, x: f(same(2, 1, 1, 5), x))
calls("norm", lambda x: x.norm(2, 1), lambda x: x.norm(1), lambda x: x.norm(p=2, dim=1, keepdim=True))
calls("std var", lambda f, x: f(x, True), lambda f, x: f(x, dim=1, correction=0))
_norm = torch.linalg.vector_norm
calls("linalg_vector_norm", lambda x: _norm(x, 2, 1), lambda x: _norm(x, 2), lambda x: _norm(x, dim=0),
      lambda x: _norm(x, 2, (1, 2), True))  # fmt: skip

# ------------------------------------------------------------------------------------------------ layers

calls("bilinear", lambda x: F.bilinear(x, 2 * x, same(2, 5, 5)), lambda x: F.bilinear(x, x.flip(0), same(2, 5, 5)),
      lambda x: F.bilinear(x, x, x[:2, 0, :, None] * same(5)))  # fmt: skip
calls("linear", lambda x: F.linear(x, same(2, 5), same(2)), lambda x: F.linear(same(4, 5), x[0]),
      lambda x: F.linear(x[0], x[1]))  # fmt: skip
IMAGE = (3, 4, 6, 5)
calls("conv1d", lambda x: F.conv1d(x, same(2, 4, 2)), lambda x: F.conv1d(x[0], same(3, 4, 2)))
calls("conv2d", lambda x: F.conv2d(x, same(2, 4, 2, 2)), lambda x: F.conv2d(x, same(4, 1, 1, 1), groups=4), shape=IMAGE)
calls("conv3d", lambda x: F.conv3d(x[:, None], same(2, 1, 2, 2, 2)), shape=IMAGE)
calls("conv_transpose1d", lambda x: F.conv_transpose1d(x, same(4, 2, 2)))
calls("conv_transpose2d", lambda x: F.conv_transpose2d(x, same(4, 2, 2, 2)), shape=IMAGE)
calls("conv_transpose3d", lambda x: F.conv_transpose3d(x[:, None], same(1, 2, 2, 2, 2)), shape=IMAGE)
calls("avg_pool1d", lambda x: F.avg_pool1d(x, 2), lambda x: F.avg_pool1d(x[0], 2))
calls("avg_pool2d", lambda x: F.avg_pool2d(x, 2), lambda x: F.avg_pool2d(x[:, 0], 2, 1), shape=IMAGE)
calls("avg_pool3d", lambda x: F.avg_pool3d(x[:, None], 2), shape=IMAGE)
calls("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2))
calls("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 3), shape=IMAGE)
calls("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x[:, None], 3), shape=IMAGE)
calls("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 2))
calls("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 3), shape=IMAGE)
calls("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x[:, None], 3), shape=IMAGE)
calls("max_pool1d", lambda x: torch.max_pool1d(x, 2))
calls("max_pool2d", lambda x: torch.max_pool2d(x, 2), shape=IMAGE)
calls("max_pool3d", lambda x: torch.max_pool3d(x[:, None], 2), shape=IMAGE)
calls("lp_pool2d", lambda x: F.lp_pool2d(x, 2.0, 2), shape=IMAGE)
calls("channel_shuffle", lambda x: torch.channel_shuffle(x, 2), shape=IMAGE)
calls("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_shuffle(x[0], 2), shape=(3, 4, 6, 5))
calls("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), shape=(3, 4, 6, 2))
calls("fold", lambda x: F.fold(x, (3, 3), 2), shape=(3, 8, 4))
calls("unfold", lambda x: F.unfold(x, 2), lambda x: x.unfold(0, 2, 1), lambda x: x.unfold(0, 1, 1),
      lambda x: x.unfold(2, 2, 2), shape=IMAGE)  # fmt: skip
calls("glu", lambda x: F.glu(x, 1), lambda x: F.glu(torch.cat([x, x]), 0))
calls("grid_sample", lambda x: F.grid_sample(x, same(3, 2, 2, 2), align_corners=False),
      lambda x: F.grid_sample(same(3, 1, 4, 4), x[..., :2], align_corners=False), shape=IMAGE)  # fmt: skip
calls("interpolate", lambda x: F.interpolate(x, scale_factor=2), shape=IMAGE)
calls("one_hot", lambda x: F.one_hot(whole(x), 10))
calls("matmul", lambda f, x: f(x, same(5, 2)), lambda f, x: f(x, x.mT), lambda f, x: f(same(2, 4), x),
      lambda f, x: f(x, same(5)), lambda f, x: f(x[0], x[1].T), lambda f, x: f(x.mT, same(4, 3)))  # fmt: skip
calls("mm", lambda x: torch.mm(x[:, 0], same(5, 2)), lambda x: torch.mm(x[:, 0], x[:, 1].T))
calls("bmm", lambda x: torch.bmm(x, x.mT), lambda x: torch.bmm(x, same(3, 5, 2)))
calls(
    "addmm", lambda x: torch.addmm(same(2), x[:, 0], same(5, 2)), lambda x: torch.addmm(x[:, 0], same(3, 4), same(4, 5))
)
calls("baddbmm", lambda x: torch.baddbmm(same(1), x, x.mT), lambda x: torch.baddbmm(x, same(3, 4, 2), same(3, 2, 5)),
      lambda x: same(1).baddbmm(batch1=x, batch2=x.mT, beta=2))  # fmt: skip
calls("einsum", lambda x: torch.einsum("bij,kj->kbi", x, same(2, 5)), lambda x: torch.einsum("bij->ij", x),
      lambda x: torch.einsum("bij,bkj->bik", [x, x]), lambda x: torch.einsum("aij,bij->ab", x, x),
      lambda x: torch.einsum("...j,kj->...k", x, same(2, 5)))  # fmt: skip
HEADS = (3, 2, 4, 5)
_attention = F.scaled_dot_product_attention
calls("scaled_dot_product_attention", lambda x: _attention(x, x, x), lambda x: _attention(same(2, 6, 5), x, x),
      lambda x: _attention(same(3, 2, 6, 5), x, same(3, 2, 4, 5)), lambda x: _attention(query=x, key=x, value=x),
      shape=HEADS)  # fmt: skip


def _heads(query: Tensor, key: Tensor) -> Any:
    width = query.shape[-1]
    return F.multi_head_attention_forward(
        query, key, key, width, 1, same(3 * width, width), None, None, None, False, 0.0, same(width, width), None
    )


calls("multi_head_attention_forward", lambda x: _heads(x, x), lambda x: _heads(same(2, 4, 5), x),
      lambda x: _heads(x, same(2, 4, 5)))  # fmt: skip
calls("embedding", lambda x: F.embedding(whole(x), same(10, 2)), lambda x: F.embedding(torch.tensor([0, 2]), x[:, 0]))
calls("embedding_bag", lambda x: F.embedding_bag(whole(x[:, 0]), same(10, 2)),
      lambda x: F.embedding_bag(whole(x[:, 0]), same(10, 4)), lambda x: F.embedding_bag(whole(x[0]), same(10, 5)),
      lambda x: F.embedding_bag(whole(x[:, 0, 0]), same(10, 2), torch.arange(3)))  # fmt: skip
_CELLS = {"gru_cell": (torch.gru_cell, 3), "lstm_cell": (torch.lstm_cell, 4), "rnn_relu_cell": (torch.rnn_relu_cell, 1),
          "rnn_tanh_cell": (torch.rnn_tanh_cell, 1)}  # fmt: skip
for _name, (_cell, _gates) in _CELLS.items():

    def _step(x: Tensor, cell: Any = _cell, gates: int = _gates) -> Any:
        state = same(len(x), 5)
        return cell(x, (state, state) if gates == 4 else state, same(5 * gates, x.shape[-1]), same(5 * gates, 5))

    calls(_name, lambda x, f=_step: f(x[:, 0]), lambda x, f=_step: f(x[0]))
for _name, _module in {
    "gru": lambda **k: nn.GRU(5, 2, **k),
    "lstm": lambda **k: nn.LSTM(5, 2, **k),
    "rnn_tanh": lambda **k: nn.RNN(5, 2, **k),
    "rnn_relu": lambda **k: nn.RNN(5, 2, nonlinearity="relu", **k),
}.items():

    def _run(x: Tensor, make: Any = _module, **options: Any) -> Any:
        torch.manual_seed(0)
        return make(**options)(x)

    calls(_name, lambda x, f=_run: f(x), lambda x, f=_run: f(x, batch_first=True),
          lambda x, f=_run: f(x, batch_first=True, bidirectional=True))  # fmt: skip

# ------------------------------------------------------------------------------------------------ indexing

calls("__getitem__", lambda x: x[:, [2, 0]], lambda x: x[[1, 0, 2]])
calls("__getitem__", lambda x: x[1], lambda x: x[:, 1:], lambda x: x[:, None, ..., 0], lambda x: x[:, INDEX],
      lambda x: x[INDEX], lambda x: x[:, :, MASK], lambda x: x[torch.arange(3), INDEX], lambda x: x[1:],
      lambda x: same(10, 2)[whole(x)], lambda x: same(2, 10)[:, whole(x)], lambda x: x[0, :, INDEX],
      lambda x: x[..., [0, 2]], lambda x: x[x[:, 0, 0] > 0.5], lambda x: x[:, 0][:, whole(x[0, 0]) % 5],
      lambda x: x[torch.tensor(1)], lambda x: x[INDEX, torch.arange(3)], lambda x: x[:, INDEX, INDEX],
      lambda x: x[INDEX, INDEX], lambda x: x[:, None, INDEX, INDEX[:, None]], lambda x: x[INDEX, :, INDEX],
      lambda x: x[INDEX, INDEX[:, None], 1:], lambda x: x[:, INDEX, whole(x[0, 0, :3]) % 5])  # fmt: skip
calls("index_select", lambda x: x.index_select(1, INDEX), lambda x: x.index_select(0, INDEX),
      lambda x: same(10, 2).index_select(0, whole(x[:, 0, 0])),
      lambda x: torch.index_select(x, dim=2, index=INDEX))  # fmt: skip
calls("gather", lambda x: x.gather(1, torch.zeros(3, 2, 5, dtype=torch.long)), lambda x: x.gather(1, whole(x) % 4),
      lambda x: x.gather(0, whole(x) % 3), lambda x: torch.gather(x, dim=-1, index=whole(x) % 5),
      lambda x: same(3, 4, 10).gather(2, whole(x)))  # fmt: skip
calls("take_along_dim", lambda x: x.take_along_dim(whole(x) % 4, 1), lambda x: x.take_along_dim(whole(x) % 3, dim=0))


def _written(*parts: Any, like: bool = False) -> Callable[[Tensor], Tensor]:
    """x written to a new tensor at an index; ``like``: to one that has samples already."""

    def write(x: Tensor) -> Tensor:
        out = torch.zeros_like(x) if like else torch.zeros(x.shape)
        out[parts] = x[parts] if parts else x
        return out

    return write


def _swapped(x: Tensor) -> Tensor:
    """Rows of other samples written over those of a tensor that has samples."""
    square = x[:, :3, 0]
    out = torch.zeros_like(square)
    out[:] = square.T
    return out


def _moved(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[torch.tensor([2, 0, 1])] = x
    return out


def _masked(x: Tensor) -> Tensor:
    out = x.clone()
    out[x > 0.5] = 0.0
    return out


def _view(x: Tensor) -> Tensor:
    out = torch.zeros(2, *x.shape)
    out[1][:] = x
    return out


calls("__setitem__", _written(slice(None), slice(1, None)), _written(slice(None)), _written(Ellipsis, 0), _swapped,
      _moved, _masked, _view, _written(slice(None), like=True), _written(0))  # fmt: skip
calls("masked_select", lambda x: x.masked_select(x > 0.5))
CALLS["masked_select"].append(Call(lambda x: (x[:, 0] > 2).sum(1) + x[:, 0, 0].masked_select(x[:, 0, 0] < 2)))
# The numbers of entries that the mask gives are those that the source has for each sample.
calls("masked_scatter masked_scatter_", lambda f, x: f(x.clone(), (x > 2) | MASK, torch.arange(60.0)),
      lambda f, x: f(same(3, 4, 5), x > 0.5, torch.arange(60.0)), lambda f, x: f(x.clone(), MASK, x))  # fmt: skip
