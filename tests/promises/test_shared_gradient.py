"""A refresh that writes the G_i of a convolution out makes its weight's gradient of them, in place of torch's own
product: the same gradients and curvature, whatever else the pass does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ngplus
from ngplus.layers import ConvRule

PAPER: dict[str, Any] = {"update_every": 1}


class Products(TorchDispatchMode):
    """How many convolutions have their weight's gradient made by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.passes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.passes += 1
            self.made += bool(args[-1][1])
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, (3, 1), stride=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, padding=2, dilation=2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


def batch(seed: int, samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 24, 24, generator=generator), torch.randint(5, (samples,), generator=generator)


Pass = Callable[[nn.Module, Tensor, Tensor], Tensor | None]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()


def differentiated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on the gradient of the input: its graph is differentiated again."""
    x = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return slope.detach()


def twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def accumulated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for a, b in zip(x.split(3), y.split(3), strict=True):
        (nn.functional.cross_entropy(model(a), b) / 2).backward()


def of_the_input(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    plain(model, x, y)
    assert x.grad is not None
    return x.grad


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = checkpoint(model[:6], x, use_reentrant=False)
    nn.functional.cross_entropy(model[6:](out), y).backward()


def reentrant(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = checkpoint(model[:6], x.clone().requires_grad_(), use_reentrant=True)
    nn.functional.cross_entropy(model[6:](out), y).backward()


def channels_last(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(model, x.to(memory_format=torch.channels_last), y)


@contextmanager
def apart() -> Iterator[None]:
    """Every product is torch's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConvRule, "with_shared_gradient", lambda self, module, inputs, output, summed: output)
        yield


def trained(way: Pass, **options: Any) -> tuple[list[Tensor], list[Tensor], Products]:
    """Gradients and curvature of the third refresh; in the first, what the capture sees is checked."""
    model = network()
    model(batch(0)[0])  # the lazy layer
    optimizer = ngplus.NGPlus(model, lr=0.01, **{**PAPER, **options})
    for k in range(2):
        optimizer.zero_grad()
        plain(model, *batch(k))
        optimizer.step()
    optimizer.zero_grad()
    products = Products()
    with products:
        more = way(model, *batch(2))
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    curved = [name for name, p in model.named_parameters() if p.dim() > 1]
    return grads + ([] if more is None else [more]), [optimizer.curvature(name).matrix for name in curved], products


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 2e-5 * float(other.norm()) + 1e-12


@pytest.mark.parametrize("options", [{}, {"curvature": "momentum"}, {"side": "right"}, {"block_size": 2}], ids=str)
@pytest.mark.parametrize(
    "way",
    [plain, differentiated, twice, accumulated, of_the_input, checkpointed, reentrant, channels_last],
)
def test_the_gradients_are_those_of_torch(way: Pass, options: dict[str, Any]) -> None:
    grads, curvature, _ = trained(way, **options)
    with apart():
        wanted, curved, _ = trained(way, **options)
    assert_close(grads, wanted)
    assert_close(curvature, curved)


def test_no_weight_gradient_is_made_twice() -> None:
    _, _, products = trained(plain)
    assert (products.passes, products.made) == (3, 0)
    with apart():
        assert trained(plain)[2].made == 3


@pytest.mark.parametrize("options", [{"samples": 0.5}, {"sketch": 2}, {"curvature": "batch"}], ids=str)
def test_where_the_gradients_are_not_all_written_out_torch_makes_them(options: dict[str, Any]) -> None:
    assert trained(plain, **options)[2].made == 3


def test_mixed_precision_is_left_alone() -> None:
    def mixed(model: nn.Module, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()

    assert trained(mixed)[2].made == 3


def test_two_optimizers_on_one_model() -> None:
    def trained_with(count: int) -> list[Tensor]:
        model = network()
        model(batch(0)[0])
        optimizers = [ngplus.NGPlus(model, lr=0.0, **PAPER) for _ in range(count)]
        for k in range(3):
            model.zero_grad()
            plain(model, *batch(k))
            for optimizer in optimizers:
                optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return grads + [optimizer.curvature("0.weight").matrix for optimizer in optimizers]

    *wanted, curvature = trained_with(1)
    *found, one, other = trained_with(2)
    assert_close(found, wanted)
    assert_close([one, other], [curvature, curvature])


def test_a_hook_of_the_user_sees_the_gradient_of_the_output() -> None:
    def seen() -> list[Tensor]:
        model, found = network(), []
        model(batch(0)[0])
        optimizer = ngplus.NGPlus(model, lr=0.01, **PAPER)
        model[0].register_forward_hook(lambda _, __, out: out.register_hook(lambda g: found.append(g.clone())) and None)
        for k in range(3):
            optimizer.zero_grad()
            plain(model, *batch(k))
            optimizer.step()
        return found

    found = seen()
    with apart():
        assert_close(found, seen())
    assert len(found) == 3


def gradients(change: Callable[[nn.Module], None]) -> list[Tensor]:
    """Of four steps; before the third the model is changed."""
    model, steps = network(), []
    model(batch(0)[0])
    optimizer = ngplus.NGPlus(model, lr=0.01, **PAPER)
    for k in range(4):
        if k == 2:
            change(model)
        optimizer.zero_grad()
        plain(model, *batch(k))
        steps += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return steps


@pytest.mark.parametrize("kind", ["another", "in place"])
def test_a_hook_of_the_user_may_change_the_gradient_of_the_output(kind: str) -> None:
    """Once training is under way, as a clamp does: the weight's gradient is that of the changed one."""

    def changed(grad: Tensor) -> Tensor | None:
        if kind == "another":
            return grad.clamp(-1e-4, 1e-4)
        grad.clamp_(-1e-4, 1e-4)
        return None

    def hooked(model: nn.Module) -> None:
        model[0].register_forward_hook(lambda _, __, out: out.register_hook(changed) and None)

    shared = gradients(hooked)
    with apart():
        assert_close(shared, gradients(hooked))


@pytest.mark.parametrize("kind", ["another weight", "another input", "no gradient of the input"])
def test_a_forward_of_the_user_s_own_is_left_alone(kind: str) -> None:
    def own(conv: nn.Conv2d, x: Tensor) -> Tensor:
        weight = conv.weight * 2 if kind == "another weight" else conv.weight
        x = 3 * x if kind == "another input" else x.detach() if kind == "no gradient of the input" else x
        return nn.functional.conv2d(x, weight, conv.bias, conv.stride, conv.padding)

    def patched(model: nn.Module) -> None:
        model[2].forward = functools.partial(own, model[2])

    shared = gradients(patched)
    with apart():
        assert_close(shared, gradients(patched))


def test_a_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.again(torch.tanh(self.again(torch.tanh(self.first(x)))))
            return x.mean((2, 3))

    def found() -> list[Tensor]:
        model = Twice()
        optimizer = ngplus.NGPlus(model, lr=0.01, **PAPER)
        steps = []
        for k in range(3):
            optimizer.zero_grad()
            model(batch(k)[0]).square().mean().backward()
            steps += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        return [*steps, optimizer.curvature("again.weight").matrix]

    shared = found()
    with apart():
        assert_close(shared, found())


def test_a_copied_model_goes_on() -> None:
    model = network()
    model(batch(0)[0])
    optimizer = ngplus.NGPlus(model, lr=0.01, **PAPER)
    for k in range(4):
        if k == 2:
            model, optimizer = copy.deepcopy((model, optimizer))
        optimizer.zero_grad()
        plain(model, *batch(k))
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
