"""Every kind of layer as a case: a model, a batch, and the matrices that its parameters should form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from helpers import reference as ref
from helpers.layer_models import (
    Attention,
    EvalNorm,
    Fields,
    Flattened,
    Positions,
    Scalar,
    SharedConv,
    Tied,
    Turned,
    Twice,
    Unknown,
    Unrolled,
    residual_net,
)

WEIGHT, BIAS = "weight", "bias"
Units = list[tuple[tuple[str, ...], Callable[..., Tensor]]]


@dataclass
class Case:
    """A model, a batch of inputs, and the matrices that its parameters should form."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    units: Units
    samples: int = 5
    take: Callable[[tuple[Any, ...], int], tuple[Any, ...]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def randn(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def randint(top: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, top, shape),)


def joined(lay: Callable[..., Tensor] = ref.rows, prefix: str = "", bias: bool = True) -> Units:
    return [((prefix + WEIGHT, prefix + BIAS) if bias else (prefix + WEIGHT,), lay)]


def each(x: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    return tuple(t[i : i + 1] for t in x)


CASES: list[Case] = [
    Case("linear-left", lambda: nn.Linear(5, 3), randn(5, 5), joined()),
    Case("linear-right", lambda: nn.Linear(3, 7), randn(5, 3), joined()),
    Case("linear-square-with-bias", lambda: nn.Linear(4, 4), randn(5, 4), joined()),
    Case("linear-no-bias", lambda: nn.Linear(4, 6, bias=False), randn(5, 4), joined(bias=False)),
    Case("linear-3d", lambda: nn.Linear(4, 3), randn(5, 6, 4), joined()),
    Case("linear-4d", lambda: nn.Linear(3, 5), randn(5, 2, 3, 3), joined()),
    Case("linear-many-positions", lambda: nn.Linear(3, 2), randn(5, 40, 3), joined()),
    Case("linear-unbatched", lambda: nn.Linear(4, 3), randn(4), joined(), samples=1, take=lambda x, i: x),
]


def conv(dim: int, name: str, spatial: tuple[int, ...], **options: Any) -> Case:
    groups = options.get("groups", 1)
    kind = getattr(nn, f"Conv{dim}d")
    bias = options.get("bias", True)
    return Case(
        f"conv{dim}d-{name}",
        lambda: kind(4, 6, **options),
        randn(5, 4, *spatial),
        joined(ref.grouped(groups), bias=bias),
    )


def conv_transpose(dim: int, name: str, spatial: tuple[int, ...], **options: Any) -> Case:
    kind = getattr(nn, f"ConvTranspose{dim}d")
    bias = options.get("bias", True)
    return Case(
        f"conv_transpose{dim}d-{name}",
        lambda: kind(4, 6, **options),
        randn(5, 4, *spatial),
        joined(ref.transposed(options.get("groups", 1)), bias=bias),
    )


CASES += [
    conv(1, "plain", (7,), kernel_size=3),
    conv(1, "stride-dilation", (11,), kernel_size=3, stride=2, dilation=2, padding=2),
    conv(1, "same-even", (9,), kernel_size=4, padding="same", dilation=2),
    conv(1, "valid", (9,), kernel_size=4, padding="valid"),
    conv(2, "plain", (6, 5), kernel_size=3),
    conv(2, "one-by-one", (5, 4), kernel_size=1),
    conv(2, "one-by-one-stride", (5, 4), kernel_size=1, stride=2, bias=False),
    conv(2, "uneven", (7, 6), kernel_size=(3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
    conv(2, "groups", (6, 5), kernel_size=3, groups=2, padding=1),
    conv(2, "same", (6, 5), kernel_size=(3, 2), padding="same"),
    *[
        conv(2, f"padding-{mode}", (6, 5), kernel_size=3, padding=(2, 1), padding_mode=mode)
        for mode in ("zeros", "reflect", "replicate", "circular")
    ],
    conv(2, "same-circular", (6, 5), kernel_size=3, padding="same", padding_mode="circular"),
    Case("conv2d-depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4), randn(5, 4, 5, 5), joined(ref.grouped(4))),
    Case(
        "conv2d-unbatched",
        lambda: nn.Conv2d(4, 3, 2),
        randn(4, 5, 5),
        joined(ref.grouped(1)),
        samples=1,
        take=lambda x, i: x,
    ),
    conv(3, "plain", (4, 5, 4), kernel_size=(1, 2, 3), padding=(0, 1, 1)),
    conv(3, "groups-stride", (4, 4, 4), kernel_size=2, stride=(1, 2, 1), groups=2),
    conv_transpose(1, "plain", (5,), kernel_size=3),
    conv_transpose(1, "stride", (5,), kernel_size=2, stride=3, output_padding=1),
    conv_transpose(1, "padding", (6,), kernel_size=3, stride=2, padding=2, dilation=2),
    conv_transpose(2, "plain", (4, 3), kernel_size=3, bias=False),
    conv_transpose(2, "all", (5, 4), kernel_size=3, stride=2, padding=1, output_padding=1, dilation=2, groups=2),
    conv_transpose(3, "plain", (3, 3, 2), kernel_size=(2, 1, 3), stride=(2, 1, 1)),
    conv_transpose(3, "padding", (4, 4, 4), kernel_size=2, padding=2, stride=2, dilation=3, groups=2),
]

CASES += [
    Case("embedding-right", lambda: nn.Embedding(10, 4), randint(10, 5, 6), joined(bias=False)),
    Case("embedding-left", lambda: nn.Embedding(3, 4), randint(3, 5, 6), joined(bias=False)),
    Case("embedding-1d-index", lambda: nn.Embedding(10, 4), randint(10, 5), joined(bias=False)),
    Case("embedding-padding", lambda: nn.Embedding(10, 4, padding_idx=2), randint(4, 5, 6), joined(bias=False)),
    Case("embedding-sparse", lambda: nn.Embedding(10, 4, sparse=True), randint(6, 5, 6), joined(bias=False)),
    Case("embedding-sparse-left", lambda: nn.Embedding(3, 4, sparse=True), randint(3, 5, 6), joined(bias=False)),
]
for mode in ("sum", "mean"):
    CASES += [
        Case(
            f"bag-{mode}-{name}",
            lambda mode=mode, options=options: nn.EmbeddingBag(9, 4, mode=mode, **options),
            randint(5, 5, 6),
            joined(bias=False),
        )
        for name, options in [
            ("rows", {}),
            ("sparse", {"sparse": True}),
            ("padding", {"padding_idx": 1}),
        ]
    ]

BAGS = torch.tensor([0, 3, 3, 7, 9])
ENTRIES = 13


def bag_entries(weights: bool = False, last: bool = False) -> Callable[[], tuple[Tensor, ...]]:
    offsets = torch.cat([BAGS, torch.tensor([ENTRIES])]) if last else BAGS
    index = (torch.randint(0, 5, (ENTRIES,)), offsets)
    return lambda: (*index, torch.rand(ENTRIES)) if weights else index


def take_bag(last: bool = False) -> Callable[[tuple[Any, ...], int], tuple[Any, ...]]:
    def take(x: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        ends = [*BAGS.tolist(), ENTRIES]
        span = slice(ends[i], ends[i + 1])
        offsets = torch.tensor([0, ends[i + 1] - ends[i]] if last else [0])
        return (x[0][span], offsets, *(t[span] for t in x[2:]))

    return take


CASES += [
    Case("bag-offsets", lambda: nn.EmbeddingBag(9, 4, mode="mean"), bag_entries(), joined(bias=False), take=take_bag()),
    Case(
        "bag-weights",
        lambda: nn.EmbeddingBag(9, 4, mode="sum", sparse=True),
        bag_entries(weights=True),
        joined(bias=False),
        take=take_bag(),
    ),
    Case(
        "bag-last-offset",
        lambda: nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True),
        bag_entries(last=True),
        joined(bias=False),
        take=take_bag(last=True),
    ),
    *(
        Case(
            f"bag-{mode}-fields",
            lambda mode=mode, options=options: Fields(mode, **options),
            randint(9, 5, 3, 6),
            joined(prefix="bag.", bias=False),
        )
        for mode, options in (("sum", {}), ("mean", {"padding_idx": 2}))
    ),
    Case("bag-left", lambda: nn.EmbeddingBag(3, 4, mode="sum"), randint(3, 5, 6), joined(bias=False)),
]

CASES += [
    Case("layer_norm", lambda: nn.LayerNorm(6), randn(5, 3, 6), joined(ref.columns)),
    Case("layer_norm-2d", lambda: nn.LayerNorm((3, 6)), randn(5, 3, 6), joined(ref.columns)),
    Case("layer_norm-no-bias", lambda: nn.LayerNorm(6, bias=False), randn(5, 6), joined(ref.columns, bias=False)),
    Case("layer_norm-one-feature", lambda: nn.LayerNorm(1), randn(5, 3, 1), joined(ref.columns)),
    Case("rms_norm", lambda: nn.RMSNorm(6), randn(5, 3, 6), joined(ref.columns, bias=False)),
    Case("group_norm", lambda: nn.GroupNorm(2, 6), randn(5, 6, 4, 3), joined(ref.columns)),
    Case("instance_norm1d", lambda: nn.InstanceNorm1d(4, affine=True), randn(5, 4, 6), joined(ref.columns)),
    Case("instance_norm2d", lambda: nn.InstanceNorm2d(4, affine=True), randn(5, 4, 3, 3), joined(ref.columns)),
    Case("instance_norm3d", lambda: nn.InstanceNorm3d(4, affine=True), randn(5, 4, 2, 3, 3), joined(ref.columns)),
    Case(
        "instance_norm-unbatched",
        lambda: nn.InstanceNorm1d(4, affine=True),
        randn(4, 6),
        joined(ref.columns),
        samples=1,
        take=lambda x, i: x,
    ),
]


CASES += [
    Case("batch_norm1d-running", lambda: EvalNorm(nn.BatchNorm1d(4)), randn(5, 4), joined(ref.columns, "norm.")),
    Case("batch_norm2d-running", lambda: EvalNorm(nn.BatchNorm2d(4)), randn(5, 4, 3, 3), joined(ref.columns, "norm.")),
    Case(
        "instance_norm-running",
        lambda: EvalNorm(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        randn(5, 4, 6),
        joined(ref.columns, "norm."),
    ),
]


IN, OUT = ("a.in_proj_weight", "a.in_proj_bias"), ("a.out_proj.weight", "a.out_proj.bias")
for first in (True, False):
    tag = "batch_first" if first else "batch_second"
    packed: Units = [(IN, ref.rows), (OUT, ref.rows)]
    separate: Units = [((f"a.{n}_proj_weight",), ref.rows) for n in "qkv"]
    separate += [(("a.in_proj_bias",), ref.columns), (OUT, ref.rows)]
    CASES += [
        Case(f"attention-self-{tag}", lambda b=first: Attention(b), randn(5, 4, 6), packed),
        Case(
            f"attention-cross-{tag}",
            lambda b=first: Attention(b),
            lambda: (torch.randn(5, 4, 6), torch.randn(5, 3, 6)),
            packed,
        ),
        Case(
            f"attention-three-{tag}",
            lambda b=first: Attention(b),
            lambda: (torch.randn(5, 4, 6), torch.randn(5, 3, 6), torch.randn(5, 3, 6)),
            packed,
        ),
        Case(
            f"attention-separate-{tag}",
            lambda b=first: Attention(b, kdim=3, vdim=4),
            lambda: (torch.randn(5, 4, 6), torch.randn(5, 3, 3), torch.randn(5, 3, 4)),
            separate,
        ),
        Case(
            f"attention-no-bias-{tag}",
            lambda b=first: Attention(b, bias=False),
            randn(5, 4, 6),
            [(("a.in_proj_weight",), ref.rows), (("a.out_proj.weight",), ref.rows)],
        ),
    ]


def encoder_units(prefix: str) -> Units:
    return [
        ((f"{prefix}self_attn.in_proj_weight", f"{prefix}self_attn.in_proj_bias"), ref.rows),
        ((f"{prefix}self_attn.out_proj.weight", f"{prefix}self_attn.out_proj.bias"), ref.rows),
        *joined(prefix=f"{prefix}linear1."),
        *joined(prefix=f"{prefix}linear2."),
        *joined(ref.columns, f"{prefix}norm1."),
    ]


CASES += [
    Case(
        "encoder-layer-batch_second",
        lambda: Turned(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)),
        randn(5, 4, 6),
        encoder_units("inner."),
    ),
    Case(
        "encoder-layer-batch_first",
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        randn(5, 4, 6),
        encoder_units(""),
    ),
    Case(
        "transformer-batch_second",
        lambda: Turned(nn.Transformer(6, 2, 1, 1, 8, dropout=0.0)),
        lambda: (torch.randn(5, 4, 6), torch.randn(5, 3, 6)),
        [
            *encoder_units("inner.encoder.layers.0."),
            *encoder_units("inner.decoder.layers.0."),
            *joined(ref.columns, "inner.encoder.norm."),
            *joined(ref.columns, "inner.decoder.norm."),
        ],
    ),
]


CASES += [
    Case(
        "tied",
        lambda: Tied(False),
        randint(9, 5, 3),
        [(("e.weight",), ref.rows), *joined(prefix="l.")],
    ),
    Case("tied-bias", lambda: Tied(True), randint(9, 5, 3), [(("e.weight", "h.bias"), ref.rows), *joined(prefix="l.")]),
    Case("tied-left", lambda: Tied(True, 3), randint(3, 5, 3), [(("e.weight", "h.bias"), ref.rows)]),
    Case("called-twice", Twice, randn(5, 4), [*joined(prefix="l."), *joined(ref.columns, "n.")]),
    Case("called-twice-positions", Twice, randn(5, 3, 4), [*joined(prefix="l."), *joined(ref.columns, "n.")]),
    Case("shared-conv", SharedConv, randn(5, 3, 7, 6), joined(ref.grouped(1), "c.")),
    Case("flattened", Flattened, randn(5, 3, 4), [*joined(prefix="l."), *joined(ref.columns, "n.")]),
    Case(
        "positions-without-batch",
        Positions,
        randint(8, 5, 6),
        [(("p.weight",), ref.rows), (("t.weight",), ref.rows), *joined(prefix="l.")],
    ),
    Case("unknown", Unknown, randn(5, 4), [(("scale",), ref.columns), *joined()]),
    Case("unknown-positions", Unknown, randn(5, 3, 4), [(("scale",), ref.columns), *joined()]),
    Case("scalar", Scalar, randn(5, 4), [(("s",), ref.columns)]),
    Case(
        "network",
        residual_net,
        randn(5, 3, 4, 4),
        [*joined(ref.grouped(1), "0."), *joined(ref.columns, "1."), *joined(prefix="4.")],
    ),
]


def cell(bias: bool = True, prefix: str = "cell.") -> Units:
    names = [(f"{prefix}weight_{end}", f"{prefix}bias_{end}") for end in ("ih", "hh")]
    return [(pair if bias else pair[:1], ref.rows) for pair in names]


CASES += [
    Case("gru-cell", lambda: Unrolled(nn.GRUCell(4, 4)), randn(5, 3, 4), cell()),
    Case("gru-cell-no-bias", lambda: Unrolled(nn.GRUCell(4, 4, bias=False)), randn(5, 3, 4), cell(False)),
    Case("gru-cell-once", lambda: nn.GRUCell(4, 3), randn(5, 4), cell(prefix="")[:1]),
    Case("rnn-cell", lambda: Unrolled(nn.RNNCell(4, 4)), randn(5, 3, 4), cell()),
    Case("rnn-cell-relu", lambda: Unrolled(nn.RNNCell(4, 4, nonlinearity="relu")), randn(5, 3, 4), cell()),
]


def squared(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples of a loss of each sample alone; unlike weights, since a norm layer fixes the plain square."""
    flat = output.reshape(len(target), -1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1]).to(flat)
    return ((flat * weights + 0.1) ** 2 * target).sum(1).mean()


def doubled(sample: tuple[Any, Any]) -> tuple[Any, Any]:
    x, y = sample
    return tuple(t.double() if t.is_floating_point() else t for t in x), y.double()
