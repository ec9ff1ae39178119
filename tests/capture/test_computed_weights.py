"""Subclasses of layers with a forward of their own, and weights that are computed from parameters.

Exact where the weight is a plain function of the parameters, whatever is done with input and output; mini-batch
curvature, with the reason, where that is not certain.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import ngplus
from helpers import reference as ref
from helpers.steps import PAPER

pytestmark = pytest.mark.usefixtures("double")


class Standardized(nn.Conv2d):
    """As in BiT: the weight of each output channel has mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, training=True, momentum=0.0)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledStandardized(nn.Conv2d):
    """As in NFNet, with a gain for each output channel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(len(self.weight), 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.weight.mean((1, 2, 3), keepdim=True), self.weight.var((1, 2, 3), keepdim=True)
        weight = (self.weight - mean) * (var + 1e-5).rsqrt() * self.gain
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class EqualizedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.3, self.bias)


class EqualizedConv(nn.Conv2d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight / self.scale, self.bias)


class ScaledEmbedding(nn.Embedding):
    """As in Gemma."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index) * 3.0


class ScaledTable(nn.Embedding):
    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, 0.2 * self.weight, self.padding_idx)


class Offset(nn.Embedding):
    """As in OPT: positions, which begin with the third row."""

    def forward(self, mask: Tensor) -> Tensor:
        return super().forward(mask.cumsum(1) + 2)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight), self.bias)


class Activated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh()).relu() * 2 + 1


class Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (2, 0)))[..., ::2]


class Upsampled(nn.ConvTranspose2d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.conv_transpose2d(x, 2 * self.weight.flip(2), self.bias, self.stride, self.padding)


class NormActivation(nn.GroupNorm):
    """As in BiT."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps).relu()


class OneMore(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class Halved(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight / 2).tanh()


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * torch.ones_like(self.weight).tril(), self.bias)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def symmetric() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def images() -> Tensor:
    return torch.randn(5, 4, 6, 5)


def words() -> Tensor:
    return torch.randint(7, (5, 4))


EXACT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "standardized": (lambda: Standardized(4, 6, 3, padding=1), images),
    "standardized, groups": (lambda: Standardized(4, 6, 3, stride=2, groups=2, bias=False), images),
    "scaled and standardized": (lambda: ScaledStandardized(4, 6, 3, dilation=2), images),
    "equalized": (lambda: EqualizedLinear(6, 3), lambda: torch.randn(5, 6)),
    "equalized, positions": (lambda: EqualizedLinear(6, 3), lambda: torch.randn(5, 7, 6)),
    "equalized convolution": (lambda: EqualizedConv(4, 6, 3, padding="same"), images),
    "equalized, circular": (lambda: EqualizedConv(4, 6, 3, padding=1, padding_mode="circular"), images),
    "scaled embedding": (lambda: ScaledEmbedding(7, 3), words),
    "scaled embedding, padding": (lambda: ScaledEmbedding(7, 3, padding_idx=-1), words),
    "scaled table": (lambda: ScaledTable(7, 3), words),
    "offset positions": (lambda: Offset(12, 3), lambda: torch.randint(2, (5, 4))),
    "cosine": (lambda: Cosine(6, 3), lambda: torch.randn(5, 6)),
    "cosine, bias off": (lambda: Cosine(6, 3, bias=False), lambda: torch.randn(5, 2, 6)),
    "activated": (lambda: Activated(6, 3), lambda: torch.randn(5, 6)),
    "causal": (lambda: Causal(4, 3, 3), lambda: torch.randn(5, 4, 8)),
    "transposed": (lambda: Upsampled(4, 3, 3, stride=2), images),
    "norm and activation": (lambda: NormActivation(2, 4), images),
    "norm, one more": (lambda: OneMore(5), images),
    "norm of two dimensions, no bias": (lambda: OneMore((6, 5), bias=False), images),
    "norm, halved": (lambda: Halved(5), images),
    "masked": (lambda: Masked(6, 4), lambda: torch.randn(5, 6)),
    "weight norm": (lambda: weight_norm(nn.Linear(6, 3)), lambda: torch.randn(5, 6)),
    "weight norm, convolution": (lambda: weight_norm(nn.Conv1d(4, 6, 3, groups=2)), lambda: torch.randn(5, 4, 8)),
    "weight norm, embedding": (lambda: weight_norm(nn.Embedding(7, 3)), words),
    "spectral norm": (lambda: spectral_norm(nn.Linear(6, 3)), lambda: torch.randn(5, 6)),
    "orthogonal": (lambda: orthogonal(nn.Linear(6, 3)), lambda: torch.randn(5, 6)),
    "symmetric": (symmetric, lambda: torch.randn(5, 4)),
    "checkpointed": (lambda: Checkpointed(nn.Linear(6, 6), Cosine(6, 3)), lambda: torch.randn(5, 6)),
}


def loss(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def stepped(model: nn.Module, x: Tensor, **options: Any) -> ngplus.NGPlus:
    optimizer = ngplus.NGPlus(model, lr=0.0, damping=0.3, **{**PAPER, **options})
    loss(model(x)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("options", [{}, {"side": "right"}, {"solver": "woodbury"}], ids=str)
@pytest.mark.parametrize("case", EXACT)
def test_a_plain_function_of_the_weight_is_exact(case: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    make, inputs = EXACT[case]
    model, x = make(), inputs()
    generator = torch.get_rng_state()
    optimizer = stepped(model, x, **options)
    assert torch.equal(torch.get_rng_state(), generator)
    model.eval()  # spectral norm iterates in training
    params = dict(model.named_parameters())
    plan = optimizer.plan()
    for row in plan:
        if row.name == "gain":  # a parameter that no rule knows
            continue
        assert row.source == "sample", row
        own = [params[name] for name in row.parameters]
        lay: Any = ref.grouped(row.groups)
        if case == "transposed":
            lay = ref.transposed(row.groups)
        elif "norm" in case and "weight" not in case and "spectral" not in case:
            lay = ref.columns
        grads = [torch.autograd.grad(loss(model(sample[None])), own) for sample in x]
        wanted = ref.gfim(torch.stack([lay(*each) for each in grads]), row.side)
        found = optimizer.curvature(row.name).matrix
        assert wanted.norm() > 1e-8
        assert ref.relative_error(found.reshape(wanted.shape), wanted) < 1e-10, row.name


class DropConnect(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, 0.5), self.bias)


class OtherUse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.weight.sum()


class OwnBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias


class Several(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.flip(1))


class Dynamic(nn.Linear):
    """The weight depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * x.mean(0).sigmoid(), self.bias)


class DynamicConstant(nn.Linear):
    """As above, without the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * x.mean(0).sigmoid().detach(), self.bias)


class InputToo(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.weight.mean())


class InPlaceInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.weight[0]
        return super().forward(x)


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * 1.0
        weight[0] = 0.0
        return F.linear(x, weight, self.bias)


class ConstantInPlace(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.ones(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight + self.mask, self.bias)
        self.mask.mul_(0.5)
        return out


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Quantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Straight.apply(self.weight), self.bias)  # type: ignore[no-untyped-call]


class ByMatmul(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


UNCERTAIN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random": (lambda: DropConnect(6, 3), "differs when it is computed again"),
    "another use": (lambda: OtherUse(6, 3), "several functions"),
    "bias of its own": (lambda: OwnBias(6, 3), "several functions"),
    "several calls": (lambda: Several(6, 3), "several functions"),
    "dynamic": (lambda: nn.Sequential(nn.Linear(6, 6), Dynamic(6, 3)), "other tensors than its parameters"),
    "dynamic constant": (lambda: DynamicConstant(6, 3), "other tensors than its parameters"),
    "input too": (lambda: InputToo(6, 3), "several functions"),
    "in place, input": (lambda: InPlaceInput(6, 3), "in place"),
    "constant in place": (lambda: ConstantInPlace(6, 3), "changes in place"),
    "in place": (lambda: InPlace(6, 3), "in place"),
    "custom function": (lambda: Quantized(6, 3), "not computed by torch functions"),
    "matmul": (lambda: ByMatmul(6, 3), "does not give its weight to linear"),
}


@pytest.mark.parametrize("case", UNCERTAIN)
def test_what_is_not_certain_has_mini_batch_curvature(case: str) -> None:
    torch.manual_seed(0)
    make, reason = UNCERTAIN[case]
    model = make()
    row = next(row for row in stepped(model, torch.randn(5, 6)).plan() if row.shape[0] == 3)
    assert row.source == "batch"
    assert reason in row.note


def test_an_error_in_the_forward_changes_nothing() -> None:
    class Failing(EqualizedLinear):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("once")
            return super().forward(x)

    model = Failing(6, 3)
    optimizer = ngplus.NGPlus(model)
    with pytest.raises(KeyError):
        model(torch.randn(5, 6))
    model.fails = False
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    assert optimizer.plan()["weight"].source == "sample"


def test_a_scaled_layer_keeps_its_cheap_form() -> None:
    """A factor of the weight is one of the inputs: no G_i is computed."""
    model = nn.Sequential(EqualizedLinear(30, 40), nn.Tanh(), nn.Linear(40, 2))
    assert stepped(model, torch.randn(4, 30), solver="dense").plan()["0.weight"].form == "rank-one"


@pytest.mark.parametrize("case", EXACT)
def test_outputs_and_gradients_are_those_of_the_model_alone(case: str) -> None:
    make, inputs = EXACT[case]
    model, x = make(), inputs()
    alone = copy.deepcopy(model)
    optimizer = ngplus.NGPlus(model)
    for each in (model, alone):
        loss(each(x)).backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    optimizer.step()
