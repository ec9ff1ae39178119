"""What capture sees is what training does: the update equals brute force however the model is called and trained."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import ngplus

EXACT = {"lr": 0.5, "momentum": 0.0, "graft": None, "damping": 0.1, "update_every": 1}
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
        self.up, self.down, self.norm, self.drop = nn.Linear(4, 5), nn.Linear(5, 4), nn.LayerNorm(4), nn.Dropout(dropout)

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


class Held:
    """The largest number of bytes that autograd nodes hold at once, each storage counted once."""

    def __init__(self) -> None:
        self.bytes, self.live = 0, {}

    def pack(self, x: Tensor) -> Tensor:
        x = x.detach()
        storage = x.untyped_storage()
        key = storage.data_ptr()
        self.live[key] = storage.nbytes()
        weakref.finalize(x, self.live.pop, key, None)
        self.bytes = max(self.bytes, sum(self.live.values()))
        return x

    def measure(self, function: Callable[[], Any]) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x):
            function()
        return self.bytes


@KINDS
def test_checkpointing_keeps_its_memory_saving_on_a_refresh(reentrant: bool) -> None:
    """What lies between the blocks' ends is not held: the forward pass holds no more with NG+ than without."""
    x, _ = data(50, 4)

    def alive(model: nn.Module) -> int:
        gc.collect()
        before = _tensor_bytes()
        output = model(x)
        gc.collect()
        after = _tensor_bytes()
        assert output.requires_grad
        return after - before

    torch.manual_seed(0)
    plain = alive(Checkpointed(None, [Block() for _ in range(6)]))
    model = Checkpointed(reentrant, [Block() for _ in range(6)])
    without = alive(model)
    optimizer = ngplus.NGPlus(model, **EXACT)
    watched = alive(model)
    assert optimizer.plan()
    one_input = x.numel() * x.element_size()
    assert without < 0.5 * plain  # the measure sees the saving
    assert watched <= without + 2 * one_input


def _tensor_bytes() -> int:
    """Resident bytes of the CPU allocator, as the process sees them."""
    return _PROFILE.current()


class _Allocator:
    """Counts what torch allocates and frees, by its own memory profiler."""

    def current(self) -> int:
        storages: dict[int, int] = {}
        stack: list[Any] = [o for o in gc.get_objects() if isinstance(o, Tensor)]
        seen: set[Any] = set()
        nodes = [t.grad_fn for t in stack if t.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [n for n, _ in node.next_functions]
            for name in dir(node):
                if name.startswith("_raw_saved"):
                    continue
                if name == "saved_tensors" or name.startswith("_saved_"):
                    try:
                        value = getattr(node, name)
                    except RuntimeError:
                        continue
                    stack += [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Tensor)]
        for t in stack:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return sum(storages.values())


_PROFILE = _Allocator()
