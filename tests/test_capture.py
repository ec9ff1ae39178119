"""What capture sees is what training does: the update equals brute force however the model is called and trained."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import ngplus

EXACT = {"lr": 0.5, "momentum": 0.0, "graft": None, "scaling": "inverse", "damping": 0.1, "update_every": 1}
N = 6


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def data(*shape: int, outputs: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, *shape, generator=generator), torch.randn(N, outputs, generator=generator)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean()


def one_by_one(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tuple(t[i : i + 1] for t in tensors) for i in range(len(tensors[0]))]


def brute_force(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = loss_fn, skip: str = "\0"
) -> dict[str, Tensor]:
    """The parameters after one step, from a loop over samples: a bias goes with its weight, a norm is two columns."""
    grads = reference.per_sample_gradients(model, loss, one_by_one(x, y))
    params = dict(model.named_parameters())
    out: dict[str, Tensor] = {}
    for name in params:
        owner, _, last = name.rpartition(".")
        bias = f"{owner}.bias" if owner else "bias"
        if name in out or skip in name or (last == "bias" and params.get(name[:-4] + "weight") is not None):
            continue
        group = [n for n in (name, bias) if n in params] if last == "weight" else [name]
        group = [n for n in dict.fromkeys(group) if params[n].requires_grad]
        if last == "weight" and bias in params and params[bias].requires_grad and not group:
            group = [bias]
        if not group:
            continue
        lay = reference.columns if params[group[0]].dim() == 1 else reference.rows
        stack = torch.stack([lay(*(g[n] for n in group)) for g in grads])
        gradient = stack.mean(0)
        side = reference.side_of(gradient)
        direction = reference.direction(gradient, reference.gfim(stack, side), side, damping=0.1)
        step = direction[0].split([1 if params[n].dim() == 1 else params[n][0].numel() for n in group], dim=1)
        for n, part in zip(group, step, strict=True):
            out[n] = (params[n] - 0.5 * part.reshape(params[n].shape)).detach()
    return out


def assert_equal(model: nn.Module, before: nn.Module, expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Compares the steps, not the parameters."""
    assert expected
    old, new = dict(before.named_parameters()), dict(model.named_parameters())
    for name, want in expected.items():
        error = reference.relative_error((new[name] - old[name]).detach(), (want - old[name]).detach())
        assert error < tolerance, f"{name}: {error:.2e}"


Train = Callable[[nn.Module, Any, Tensor, Tensor], None]


def one_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()


def several_steps(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(3):
        one_step(model, optimizer, x, y)


def check(model: nn.Module, x: Tensor, y: Tensor, train: Train = one_step, **options: Any) -> ngplus.NGPlus:
    """One step of ``train`` equals brute force, with no warning and with per-sample curvature for every parameter."""
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y)
    optimizer = ngplus.NGPlus(model, **{**EXACT, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="No per-sample curvature")
        train(model, optimizer, x, y)
    assert_equal(model, before, expected)
    return optimizer


# ------------------------------------------------------------------------------------------------ models


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


class Recurrent(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.drop = (
            nn.Linear(4, 5),
            nn.Linear(5, 4),
            nn.LayerNorm(4),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.down(torch.tanh(self.up(x)))))


class Model(nn.Module):
    """A model from a plain function of itself."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor) -> Tensor:
        return self._forward(self, *args)


# ------------------------------------------------------------------------------------------------ in place


def test_in_place_activations_and_residuals() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.relu_(m.a(x))
        z = m.b(h)
        z += h
        z.mul_(1.5).tanh_()
        return m.c(z)

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3)), *data(4))


def test_norm_then_in_place_activation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    check(model, *data(4))


def test_in_place_change_of_an_input_that_torch_has_not_saved() -> None:
    """With a frozen weight torch needs no input, so a model may overwrite it; so it may with NG+."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x * 2
        z = m.a(h)
        h.add_(1.0)
        return m.b(z + h)

    model = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    model.a.weight.requires_grad_(False)
    check(model, *data(4))


class Shift(nn.Module):
    """A layer that no rule knows and that saves nothing for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_in_place_change_of_the_input_of_an_unknown_layer() -> None:
    """Per-sample curvature may be lost, the training step may not."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        z = m.shift(h)
        h.add_(1.0)
        return m.b(z * 2 + h)

    model = Model(forward, a=nn.Linear(4, 4), shift=Shift(), b=nn.Linear(4, 3))
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y, skip="shift")
    one_step(model, ngplus.NGPlus(model, **EXACT), x, y)
    assert_equal(model, before, expected)


# ------------------------------------------------------------------------------------------------ several uses


def test_module_called_several_times() -> None:
    check(Recurrent(), *data(4))


def test_module_called_with_unlike_numbers_of_positions() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)).mean(1) + m.a(x.mean(1)))

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(5, 4))


def test_shared_module() -> None:
    block = Block()
    check(nn.Sequential(block, nn.Linear(4, 4), block, nn.Linear(4, 3)), *data(4))


def test_output_that_the_loss_does_not_use() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.a(x.flip(0))
        return m.b(torch.tanh(m.a(x)))

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(4))


def test_flattened_positions() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(torch.tanh(m.a(x.flatten(0, 1))))
        return m.b(h).unflatten(0, (len(x), -1)).mean(1)

    check(Model(forward, a=nn.Linear(4, 4), norm=nn.LayerNorm(4), b=nn.Linear(4, 3)), *data(5, 4))


def test_siamese_calls_of_the_whole_model_in_one_loss() -> None:
    """Two calls in one backward pass are two uses by the same samples."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) - self.body(-x).square()

    model = Siamese()
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = {name.removeprefix("body."): value for name, value in brute_force(before, x, y).items()}
    optimizer = ngplus.NGPlus(model.body, **EXACT)  # the optimizer knows the body only, called twice
    one_step(model, optimizer, x, y)
    assert_equal(model.body, before.body, expected)


@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_functional_use_of_a_weight_is_noticed(scale: float) -> None:
    """No hook sees F.linear: the step says so, and takes the mini-batch's curvature."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(x) + scale * F.linear(x.flip(1), m.a.weight)

    model = Model(forward, a=nn.Linear(4, 3))
    optimizer = ngplus.NGPlus(model, **EXACT)
    with pytest.warns(UserWarning, match=r"a\.weight"):
        one_step(model, optimizer, *data(4))
    assert optimizer.plan()["a.weight"].source == "batch"


class TwoOutputs(nn.Module):
    """A layer that no rule knows, with two outputs: the second alone depends on ``v``."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.w.mT, x @ self.v.mT


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_unknown_layer_with_two_outputs() -> None:
    """Exact, or mini-batch curvature: never a part of the gradient taken for the whole."""

    def forward(m: Any, x: Tensor) -> Tensor:
        first, second = m.two(torch.tanh(m.a(x)))
        return first + second.square()

    model = Model(forward, a=nn.Linear(4, 4), two=TwoOutputs())
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y)
    optimizer = ngplus.NGPlus(model, **EXACT)
    one_step(model, optimizer, x, y)
    sampled = {n: e for n, e in expected.items() if optimizer.plan()[n].source != "batch"}
    assert "a.weight" in sampled
    assert_equal(model, before, sampled)


# ------------------------------------------------------------------------------------------------ checkpointing

KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None, blocks: list[nn.Module], nested: bool = False) -> None:
        super().__init__()
        self.reentrant, self.nested = reentrant, nested
        self.first, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList(blocks), nn.Linear(4, 3)

    def _call(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._call(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self._call(self._all, h) if self.nested else self._all(h)
        return self.head(h.flatten(1, -2).mean(1) if h.dim() > 2 else h)


@KINDS
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing(reentrant: bool, nested: bool, shared: bool) -> None:
    first = Block()
    check(Checkpointed(reentrant, [first, first if shared else Block()], nested), *data(4))


@KINDS
def test_module_used_inside_and_outside_of_a_checkpoint(reentrant: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        h = checkpoint(lambda h: torch.tanh(m.a(torch.tanh(m.a(h)))), h, use_reentrant=reentrant)
        return m.b(torch.tanh(m.a(h)))

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(4))


@KINDS
def test_checkpointing_with_accumulation(reentrant: bool) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for i in range(0, N, 2):
            (loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3).backward()
        optimizer.step()

    check(Checkpointed(reentrant, [Block(), Block()]), *data(4), train)


def parameters_after(model: nn.Module, x: Tensor, y: Tensor, steps: int = 2) -> Tensor:
    optimizer = ngplus.NGPlus(model, **EXACT)
    torch.manual_seed(3)
    for _ in range(steps):
        one_step(model, optimizer, x, y)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@KINDS
@pytest.mark.parametrize("layer", ["block", "transformer"])
def test_checkpointing_with_dropout_changes_nothing(reentrant: bool, layer: str) -> None:
    def block() -> nn.Module:
        if layer == "block":
            return Block(dropout=0.3)
        return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)

    x, y = data(5, 4)
    runs = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        runs.append(parameters_after(Checkpointed(kind, [block(), block()]), x, y))
    assert reference.relative_error(runs[1], runs[0]) < 1e-9


def inner_activations(model: Checkpointed) -> list[StorageWeakRef]:
    """Collects, as the model runs, the memory of what its blocks compute on the way."""
    held: list[StorageWeakRef] = []
    for block in model.blocks:
        block.down.register_forward_pre_hook(lambda _, args: held.append(StorageWeakRef(args[0].untyped_storage())))
    return held


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_checkpointing_keeps_its_memory_saving_on_a_refresh(reentrant: bool | None) -> None:
    model = Checkpointed(reentrant, [Block(), Block()])
    optimizer = ngplus.NGPlus(model, **EXACT)
    held = inner_activations(model)
    x, y = data(4)
    loss = loss_fn(model(x), y)
    assert len(held) == 2
    # Without checkpoints the activations are there, so the measure can tell; with them they are not.
    assert [ref.expired() for ref in held] == [reentrant is not None] * 2
    loss.backward()
    del loss
    assert all(ref.expired() for ref in held)
    optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"sample"}


# ------------------------------------------------------------------------------------------------ backward passes

BOTH = pytest.mark.parametrize("model", [mlp, Recurrent], ids=["mlp", "called thrice"])
Make = Callable[[], nn.Module]


@BOTH
@pytest.mark.parametrize("cuts", [(0, 2, 4, 6), (0, 1, 6), (0, 1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("curvature", ["sample", "momentum"])
def test_accumulation_equals_the_whole_batch(model: Make, cuts: tuple[int, ...], curvature: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for a, b in pairwise(cuts):
            (loss_fn(model(x[a:b]), y[a:b]) * (b - a) / N).backward()
        optimizer.step()

    optimizer = check(model(), *data(4), train, curvature=curvature)
    assert optimizer.param_groups[0]["step"] == 1


@BOTH
def test_all_forward_passes_before_the_backward_passes(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        losses = [loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3 for i in range(0, N, 2)]
        for loss in losses:
            loss.backward()
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_two_losses_on_one_graph(model: Make) -> None:
    """Two backward passes through the same forward pass bring the same samples, not more of them."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        error = (model(x) - y).square()
        error[:, 0].mean().backward(retain_graph=True)
        error[:, 1:].sum(1).mean().backward()
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_one_loss_backward_twice(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = loss_fn(model(x), y) / 2
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_forward_passes_without_backward(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        model(x[:2] * 3)
        loss = loss_fn(model(x), y)
        model(x[:4] + 1)
        loss.backward()
        model(x)
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_forward_pass_that_fails(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(2, 9))
        one_step(model, optimizer, x, y)

    check(model(), *data(4), train)


@BOTH
def test_zero_grad_between_forward_and_backward(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    check(model(), *data(4), train)


DISCARD = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


@BOTH
@pytest.mark.parametrize("discard", DISCARD)
def test_gradients_thrown_away(model: Make, discard: str) -> None:
    """A backward pass whose gradients are dropped leaves no trace, whoever drops them."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss_fn(model(x.flip(0) * 2), y).backward()
        DISCARD[discard](model, optimizer)
        loss_fn(model(x), y).backward()
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_gradient_of_the_input_alone(model: Make) -> None:
    """Adversarial examples: autograd.grad for the input passes through the layers, and concerns no parameter."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        probe = x.clone().requires_grad_()
        torch.autograd.grad(loss_fn(model(probe), y) * 3, probe)
        one_step(model, optimizer, x, y)

    def grad_after_zero_grad(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        probe = x.clone().requires_grad_()
        torch.autograd.grad(loss_fn(model(probe), y) * 3, probe)
        loss_fn(model(x), y).backward()
        optimizer.step()

    check(model(), *data(4), train)
    check(model(), *data(4), grad_after_zero_grad)


@BOTH
@pytest.mark.parametrize("kind", ["autograd.grad", "backward(inputs=)", "closure"])
def test_other_ways_to_a_gradient(model: Make, kind: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            return loss

        params = list(model.parameters())
        if kind == "closure":
            assert optimizer.step(closure) > 0
            return
        if kind == "autograd.grad":
            for p, g in zip(params, torch.autograd.grad(loss_fn(model(x), y), params), strict=True):
                p.grad = g
        else:
            loss_fn(model(x), y).backward(inputs=params)
        optimizer.step()

    check(model(), *data(4), train)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph() -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss_fn(model(x), y).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    check(mlp(), *data(4), train)


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_does_not_cost_the_curvature(clip: str) -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, y = data(4)
    loss_fn(model(x), y).backward()
    if clip == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    assert [row.source for row in optimizer.plan()] == ["sample", "sample"]


# ------------------------------------------------------------------------------------------------ evaluation


@BOTH
def test_evaluation_in_the_middle(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = loss_fn(model(x), y)
        model.eval()
        with torch.no_grad():
            model(x[:2])
        with torch.inference_mode():
            model(x[:2])
        loss_fn(model(x[:1]), y[:1])
        model.train()
        loss.backward()
        with torch.no_grad():
            model(x[:3])
        optimizer.step()

    check(model(), *data(4), train)


def test_gradient_taken_in_eval_mode_is_not_captured() -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        model.eval()
        probe = x.clone().requires_grad_()
        (saliency,) = torch.autograd.grad(model(probe).sum(), probe)
        assert saliency.norm() > 0
        model.train()
        one_step(model, optimizer, x, y)

    check(mlp(), *data(4), train)


def test_training_in_eval_mode_warns() -> None:
    model = mlp().eval()
    optimizer = ngplus.NGPlus(model, **EXACT)
    with pytest.warns(UserWarning, match=r"0\.weight.*train\(\)"):
        one_step(model, optimizer, *data(4))


def test_functional_transforms_of_a_watched_model() -> None:
    """torch.func on a model that is armed for a refresh neither fails nor is captured."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss_fn(torch.func.functional_call(model, params, (x[None],)), y[None])

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
        assert per_sample["0.weight"].shape == (N, 5, 4)
        one_step(model, optimizer, x, y)

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    check(model, *data(4), train)


# ------------------------------------------------------------------------------------------------ frozen and unused


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_frozen_parameter(frozen: str) -> None:
    model = mlp()
    model.get_parameter(frozen).requires_grad_(False)
    before = copy.deepcopy(model)
    check(model, *data(4))
    assert torch.equal(model.get_parameter(frozen), before.get_parameter(frozen))


def test_bias_alone_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    check(model, *data(4))


def test_frozen_and_thawed_during_training() -> None:
    """After each change the step is that of a new optimizer on the same model."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, y = data(4)
    changes = [(), ("0.weight", "0.bias"), ("2.bias",), (), ("0.bias",), ()]
    for frozen in changes:
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
        before = copy.deepcopy(model)
        expected = brute_force(before, x, y)
        one_step(model, optimizer, x, y)
        assert_equal(model, before, expected)
        for name in frozen:
            assert torch.equal(model.get_parameter(name), before.get_parameter(name))


def test_frozen_and_thawed_between_refreshes() -> None:
    """Thawed where no refresh is due: the layer gets one of its own, the others keep theirs."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 100})
    x, y = data(4)
    model[0].bias.requires_grad_(False)
    one_step(model, optimizer, x, y)
    one_step(model, optimizer, x, y)
    model[0].bias.requires_grad_(True)
    kept = optimizer.curvature("2.weight").matrix.clone()
    before = copy.deepcopy(model)
    expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("0.")}
    one_step(model, optimizer, x, y)
    assert_equal(model, before, expected)
    assert torch.allclose(optimizer.curvature("2.weight").matrix, kept)


def test_unused_modules() -> None:
    model = Model(lambda m, x: m.used(x), used=nn.Linear(4, 3), unused=nn.Linear(4, 3), table=nn.Embedding(5, 4))
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("used")}
    optimizer = ngplus.NGPlus(model, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            one_step(model, optimizer, x, y)
            assert_equal(model, before, expected)
            before = copy.deepcopy(model)
            expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("used")}
    for name in ("unused.weight", "unused.bias", "table.weight"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))


def test_module_used_from_the_second_step_on() -> None:
    model = Model(lambda m, x: m.late(x) if m.on else m.early(x), early=nn.Linear(4, 3), late=nn.Linear(4, 3))
    model.on = False
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 100})
    x, y = data(4)
    one_step(model, optimizer, x, y)
    model.on = True
    before = copy.deepcopy(model)
    expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("late")}
    one_step(model, optimizer, x, y)
    assert_equal(model, before, expected)


# ------------------------------------------------------------------------------------------------ hooks and copies

USER_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: out * 2 + 1),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "full backward": lambda m: m.register_full_backward_hook(lambda m, inputs, outputs: None),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, outputs: None),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", USER_HOOKS)
def test_user_hooks(hook: str, when: str) -> None:
    """Hooks that look or change, put on before or after the optimizer was made."""
    model, hooked = mlp(), None
    model[1] = nn.Tanh()
    hooked = copy.deepcopy(model)
    USER_HOOKS[hook](hooked[0])
    x, y = data(4)
    expected = brute_force(hooked, x, y)
    if when == "before":
        USER_HOOKS[hook](model[0])
    optimizer = ngplus.NGPlus(model, **EXACT)
    if when == "after":
        USER_HOOKS[hook](model[0])
    one_step(model, optimizer, x, y)
    assert_equal(model, hooked, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_user_hook_that_makes_a_tuple(when: str) -> None:
    model = Model(lambda m, x: m.b(torch.tanh(m.a(x)[0])), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    hook = lambda m, args, out: (out, "note")  # noqa: E731
    hooked = copy.deepcopy(model)
    hooked.a.register_forward_hook(hook)
    x, y = data(4)
    expected = brute_force(hooked, x, y)
    if when == "before":
        model.a.register_forward_hook(hook)
    optimizer = ngplus.NGPlus(model, **EXACT)
    if when == "after":
        model.a.register_forward_hook(hook)
    one_step(model, optimizer, x, y)
    assert_equal(model, hooked, expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_hooks_of_a_copied_model_are_inert(how: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        loss = loss_fn(model(x), y)
        loss_fn(other(x * 3), y).backward()
        assert other[0].weight.grad is not None
        loss.backward()
        optimizer.step()

    check(mlp(), *data(4), train)


def test_hooks_go_with_their_optimizer() -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    assert any(m._forward_hooks for m in model.modules())
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_copied_optimizer_watches_its_own_model() -> None:
    optimizer = ngplus.NGPlus(mlp(), **EXACT)
    model = mlp()
    pair = copy.deepcopy({"model": model, "optimizer": ngplus.NGPlus(model, **EXACT)})
    x, y = data(4)
    before = copy.deepcopy(pair["model"])
    expected = brute_force(before, x, y)
    one_step(pair["model"], pair["optimizer"], x, y)
    assert_equal(pair["model"], before, expected)
    assert optimizer.param_groups[0]["step"] == 0


def test_two_optimizers_share_a_model() -> None:
    model = mlp()
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y)
    first = ngplus.NGPlus(model[0].parameters(), model=model, **EXACT)
    second = ngplus.NGPlus(model[2].parameters(), model=model, **EXACT)
    loss_fn(model(x), y).backward()
    first.step()
    second.step()
    assert_equal(model, before, expected)


def test_wrapped_model() -> None:
    """The optimizer on the model, the call through a wrapper, and the other way round."""
    x, y = data(4)
    for inner in (True, False):
        model = mlp()
        wrapper = nn.Sequential(model)
        before = copy.deepcopy(model)
        expected = brute_force(before, x, y)
        optimizer = ngplus.NGPlus(model if inner else wrapper, **EXACT)
        one_step(wrapper, optimizer, x, y)
        assert_equal(model, before, expected)


def test_group_added_in_the_plain_way() -> None:
    """As in torch: a dict with params, though the optimizer was made from a model."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    one_step(model, optimizer, *data(4))
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y)
    one_step(model, optimizer, x, y)
    assert_equal(model, before, expected)


# ------------------------------------------------------------------------------------------------ weights in disguise


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.mT


def _symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


DISGUISES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrize": _symmetric,
}


@pytest.mark.parametrize(
    ("disguise", "when"),
    [(name, "before") for name in DISGUISES] + [(name, "after") for name in DISGUISES if name != "weight_norm"],
)
def test_parametrized_weight_warns_and_falls_back(disguise: str, when: str) -> None:
    """A weight that is computed is no parameter of its layer: mini-batch curvature for it, exact for all others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    if when == "after":
        optimizer = ngplus.NGPlus(model, **EXACT)
        DISGUISES[disguise](model[0])
    else:
        DISGUISES[disguise](model[0])
        optimizer = ngplus.NGPlus(model, **EXACT)
    x, y = data(4)
    before = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"No per-sample curvature for 0\."):
        one_step(model, optimizer, x, y)
    assert optimizer.plan()["2.weight"].source == "sample"
    hidden = [row for row in optimizer.plan() if row.name.startswith("0.") and row.name != "0.bias"]
    assert {row.source for row in hidden} == {"batch"}
    if disguise != "spectral_norm":  # whose forward changes its buffers
        expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("2.")}
        assert_equal(model, before, expected)


def test_loose_parameters_warn_and_fall_back() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.token = nn.Linear(4, 3), nn.Parameter(torch.randn(4))
            self.list = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh((x + self.token) @ self.list[0]))

    model = Loose()
    optimizer = ngplus.NGPlus(model, **EXACT)
    with pytest.warns(UserWarning, match="No per-sample curvature") as caught:
        several_steps(model, optimizer, *data(4))
    assert len(caught) == 1
    assert all(name in str(caught[0].message) for name in ("token", "list.0"))
    assert {row.name: row.source for row in optimizer.plan()} == {
        "token": "batch", "head.weight": "sample", "list.0": "batch",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the same outputs


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", ["attention", "encoder layer", "decoder layer"])
def test_a_refresh_changes_no_output(layer: str, batch_first: bool) -> None:
    """Dropout on, the same seed: a step that watches computes what a step that does not watch computes."""
    make = {
        "attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=batch_first),
        "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=batch_first),
        "decoder layer": lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.3, batch_first=batch_first),
    }[layer]
    model = make()
    x, _ = data(5, 4)
    count = {"attention": 3, "encoder layer": 1, "decoder layer": 2}[layer]

    def run() -> Tensor:
        torch.manual_seed(7)
        output = model(*[x] * count)
        return (output[0] if isinstance(output, tuple) else output).detach()

    plain = run()
    optimizer = ngplus.NGPlus(model, **EXACT)
    assert torch.allclose(run(), plain, rtol=0, atol=1e-12)
    assert optimizer.plan()


# ------------------------------------------------------------------------------------------------ scaled and compiled


@pytest.mark.parametrize("unscale", [False, True])
def test_loss_scaling_does_not_scale_the_curvature(unscale: bool) -> None:
    """scaler.unscale_ before the step, the usual way to clip, takes the scale off the gradients only."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_fn(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    check(mlp(), *data(4), train)


@pytest.mark.parametrize("new", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scaling", ["inverse", "adaptive"])
def test_dtype_changed_between_refreshes(new: torch.dtype, scaling: str) -> None:
    old = torch.float64 if new == torch.float32 else torch.float32
    model = mlp().to(old)
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 100, "scaling": scaling})
    x, y = data(4)
    one_step(model, optimizer, x.to(old), y.to(old))
    model.to(new)
    before = copy.deepcopy(model)
    one_step(model, optimizer, x.to(new), y.to(new))
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert all(p.isfinite().all() and p.dtype == new for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "fullgraph"), [("model", False), ("compiled model", False), ("compiled model", True)]
)
def test_compiled_model(given: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    plain = copy.deepcopy(model)
    x, y = data(4)
    options = {**EXACT, "update_every": 2}
    optimizer = ngplus.NGPlus(model if given == "model" else compiled, **options)
    several_steps(compiled, optimizer, x, y)
    before = copy.deepcopy(plain)
    several_steps(plain, ngplus.NGPlus(plain, **options), x, y)
    assert_equal(model, before, dict(plain.named_parameters()))
