"""What capture sees is what training does: the update equals brute force however the model is called."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import ngplus
from helpers.steps import (
    EXACT,
    Block,
    Model,
    Recurrent,
    assert_equal,
    brute_force,
    check,
    data,
    loss_fn,
    mlp,
    one_step,
    several_steps,
)

pytestmark = pytest.mark.usefixtures("double")


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


@pytest.mark.parametrize("kind", ["states", "words"])
@pytest.mark.parametrize("rows", [1, 5])
def test_flattened_output(kind: str, rows: int) -> None:
    """A language model that gives its logits as [batch * length, words]."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)).flatten(0, 1))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output.unflatten(0, (len(target), -1)).mean(1), target)

    x, y = data(rows, 4)
    words = kind == "words"
    x = (10 * x[..., 0]).long() % 11 if words else x
    model = Model(forward, a=nn.Embedding(11, 4) if words else nn.Linear(4, 4), b=nn.Linear(4, 3))
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y, loss)
    optimizer = ngplus.NGPlus(model, **EXACT)
    loss(model(x), y).backward()
    optimizer.step()
    assert_equal(model, before, expected)
    assert {row.source for row in optimizer.plan()} == {"sample"}


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


class Memory(bytearray):
    """Bytes that can be seen to go."""


class InMemory(torch.autograd.Function):
    """The identity, whose output lies in memory of its own."""

    held: ClassVar[list[weakref.ref[Memory]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        memory = Memory(x.numel() * x.element_size())
        InMemory.held.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_captured_inputs_go_when_their_layer_is_done() -> None:
    """Backward has freed the input of the last layer when it gets to the first one, with a refresh as without."""

    class Known(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return InMemory.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    model = nn.Sequential(nn.Linear(5, 4), Known(), nn.Linear(4, 2))
    optimizer = ngplus.NGPlus(model, update_every=2)
    alive: list[bool] = []

    def look_back(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: alive.append(InMemory.held[-1]() is not None))

    model[0].register_forward_hook(look_back)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 5)).square().mean()
        assert InMemory.held[-1]() is not None
        loss.backward()
        optimizer.step()
    assert alive == [False] * 4


class ThereAndBack(nn.Module):
    """One weight in a convolution and in the transposed one behind it, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.there(x)))


def test_a_weight_tied_in_layouts_that_do_not_agree_falls_back() -> None:
    model = ThereAndBack()
    optimizer = ngplus.NGPlus(model, lr=0.01)
    plan = optimizer.plan()
    assert {name for row in plan for name in row.parameters} == {"there.weight", "there.bias", "back.bias"}
    assert all("do not agree" in row.note for row in plan)
    x = torch.randn(4, 3, 6, 6)

    def train() -> float:
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    with pytest.warns(UserWarning, match="No per-sample curvature"):
        first = train()
    assert train() < first


# ------------------------------------------------------------------------------------------------ layouts

SPARSE = {"coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr()}
NO_NOISE = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors", "ignore:No per-sample curvature"
)


@NO_NOISE
@pytest.mark.parametrize("frozen", ["nothing", "weight"])
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_inputs(kind: str, frozen: str) -> None:
    """The layer that takes them has mini-batch curvature, unless its bias alone is trained; the others are exact."""
    model = mlp()
    if frozen == "weight":
        model[0].weight.requires_grad_(False)
    x, y = data(4)
    before, thin = copy.deepcopy(model), SPARSE[kind](F.relu(x))
    expected = brute_force(before, thin.to_dense(), y, skip="\0" if frozen == "weight" else "0.")
    loss_fn(before(thin), y).backward()
    optimizer = ngplus.NGPlus(model, **EXACT)
    loss_fn(model(thin), y).backward()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    optimizer.step()
    assert_equal(model, before, expected)
    first, last = optimizer.plan()
    assert (first.source, last.source) == ("sample" if frozen == "weight" else "batch", "sample")
    assert "sparse or nested" in first.note or frozen == "weight"


class Mixed(nn.Module):
    """A layer that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


@NO_NOISE
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_inputs(layout: torch.layout, batch_dim: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(torch.relu(m.a(x)))
        return m.b(torch.nested.to_padded_tensor(m.mixed(h), 0.0).sum(1))

    model = Model(forward, a=nn.Linear(4, 4), norm=nn.LayerNorm(4), mixed=Mixed(), b=nn.Linear(4, 3))
    x, y = data(5, 4)
    nested = torch.nested.nested_tensor([row[: i % 5 + 1] for i, row in enumerate(x)], layout=layout)
    before = copy.deepcopy(model)
    loss_fn(before(nested), y).backward()
    optimizer = ngplus.NGPlus(model, **EXACT, batch_dim=batch_dim)
    loss_fn(model(nested), y).backward()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    optimizer.step()
    rows = {row.name: row for row in optimizer.plan()}
    assert {name for name, row in rows.items() if "sparse or nested" in row.note} == set(rows) - {"b.weight"}
    assert rows["b.weight"].source == "sample"
