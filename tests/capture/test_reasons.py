"""Why a matrix has mini-batch curvature: the reason names what happened, and one warning tells all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from ngplus.capture import reasons


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.expert = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor, expert: bool = True) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h + self.expert(h) if expert else h)


def in_eval_mode(model: Net, optimizer: Any, x: Tensor) -> None:
    model.eval()(x).square().mean().backward()


def without_tokens(model: Net, optimizer: Any, x: Tensor) -> None:
    model(x, expert=False).square().mean().backward()
    model.expert.weight.grad = torch.ones_like(model.expert.weight)


def by_torch_func(model: Net, optimizer: Any, x: Tensor) -> None:
    params = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(params)
    for name, param in params.items():
        param.grad = found[name].detach()


def under_no_grad(model: Net, optimizer: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def detached(model: Net, optimizer: Any, x: Tensor) -> None:
    model.b(torch.tanh(model.a(x)).detach())
    (model(x).detach() * model.b.weight.sum()).sum().backward()


def gradient_surgery(model: Net, optimizer: Any, x: Tensor) -> None:
    found = []
    for part in (0, 1):
        optimizer.zero_grad()
        model(x)[:, part].square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    optimizer.zero_grad()
    for param, *grads in zip(model.parameters(), *found, strict=True):
        param.grad = sum(grads)


def two_calls(model: Net, optimizer: Any, x: Tensor) -> None:
    (model(x).square().mean() + model(x + 1).square().mean()).backward()


def gradient_penalty(model: Net, optimizer: Any, x: Tensor) -> None:
    x.requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + slope.square().mean()).backward()


def used_by_a_function(model: Net, optimizer: Any, x: Tensor) -> None:
    (model(x).square().mean() + F.linear(x, model.a.weight).square().mean()).backward()


HAPPENINGS: dict[Callable[..., None], tuple[str, str]] = {
    in_eval_mode: ("a.weight", reasons.EVAL),
    without_tokens: ("expert.weight", reasons.NOT_CALLED),
    by_torch_func: ("a.weight", reasons.FUNCTIONAL),
    under_no_grad: ("a.weight", reasons.NO_GRAD),
    detached: ("b.weight", reasons.NOT_REACHED),
    gradient_surgery: ("a.weight", reasons.ZEROED),
    gradient_penalty: ("a.weight", reasons.DOUBLE_BACKWARD),
    used_by_a_function: ("a.weight", reasons.OTHER_USES),
    two_calls: ("a.weight", reasons.SEVERAL_CALLS),
}


@pytest.mark.parametrize("what", HAPPENINGS, ids=lambda f: f.__name__)
def test_the_reason_names_what_happened(what: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = ngplus.NGPlus(model, update_every=1)
    name, reason = HAPPENINGS[what]
    what(model, optimizer, torch.randn(5, 3))
    with pytest.warns(UserWarning, match="No per-sample curvature"):
        optimizer.step()
    row = optimizer.plan()[name]
    assert (row.source, reasons.without_detail(row.note)) == ("batch", reason)


def test_a_refresh_after_it_has_samples_again() -> None:
    model, x = Net(), torch.randn(5, 3)
    optimizer = ngplus.NGPlus(model, update_every=1)
    without_tokens(model, optimizer, x)
    with pytest.warns(UserWarning, match="for expert.weight: its module was not called"):
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    assert [(row.source, row.note, row.seen) for row in optimizer.plan()] == [("sample", "", (5, 1))] * 3


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("kind", [ngplus.NGPlus, ngplus.baselines.KFAC])
def test_a_scripted_model_has_mini_batch_curvature(kind: Any, how: str) -> None:
    plain, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    model = torch.jit.script(plain) if how == "script" else torch.jit.trace(plain, x)
    optimizer = kind(model, lr=0.01)
    first = model(x).square().mean()
    first.backward()
    with pytest.warns(UserWarning, match=reasons.SCRIPTED):
        optimizer.step()
    assert {(row.source, row.note) for row in optimizer.plan()} == {("batch", reasons.SCRIPTED)}
    assert model(x).square().mean() < first


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_part_of_a_model() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2)), torch.randn(5, 3)
    optimizer = ngplus.NGPlus(model)
    model(x).square().mean().backward()
    with pytest.warns(UserWarning, match=reasons.SCRIPTED) as caught:
        optimizer.step()
    assert len([w for w in caught if "No per-sample" in str(w.message)]) == 1
    plan = optimizer.plan()
    assert plan["0.weight"].source == "sample"
    assert plan["1.weight"].note == plan["1.bias"].note == reasons.SCRIPTED
    assert plan["2.weight"].source == "batch"  # what a scripted function does with rows is not seen


class ManyReasons(nn.Module):
    """Six reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, num_layers=3, batch_first=True)
        self.shifts = nn.ParameterList([torch.zeros(4) for _ in range(3)])
        self.fixed, self.chosen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.also, self.plain = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.recurrent(x)[0].mean(1) + sum(self.shifts) + self.fixed(torch.ones(1, 4))
        h = h + self.chosen(h[h.sum(1).argsort()]) + self.also(h) + F.linear(h.flip(1), self.also.weight)
        return self.plain(torch.tanh(h)) + 0 * self.unused.weight.sum()


def test_the_warning_has_three_lines_of_reasons_and_where_to_read_more() -> None:
    model = ManyReasons()
    optimizer = ngplus.NGPlus(model, lr=0.01, update_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6, 3)).square().mean().backward()
            optimizer.step()
    (warning,) = caught
    assert warning.filename == __file__
    lines = str(warning.message).splitlines()
    assert lines == [
        "No per-sample curvature for recurrent.weight_ih_l0, recurrent.weight_hh_l0 and 4 more: its module has several "
        "outputs: LSTM",
        "  and for shifts.0, shifts.1 and 1 more: no layer rule covers it",
        "  and for 5 more, for 4 other reasons",
        "They have mini-batch curvature. plan() lists them, and docs/troubleshooting.md explains the reasons",
    ]


DIMS = {
    "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {**DIMS, "num_key_value_heads": 2, "num_local_experts": 3}),
    "DebertaV2": (
        "DebertaV2ForMaskedLM",
        {**DIMS, "relative_attention": True, "position_buckets": 4, "pos_att_type": ["c2p"], "share_att_key": True},
    ),
    "XLNet": ("XLNetLMHeadModel", {"vocab_size": 50, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8}),
    "Longformer": ("LongformerForMaskedLM", {**DIMS, "attention_window": [4], "max_position_embeddings": 20}),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_one_warning_of_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, options = MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options)).train()
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=1)
    ids = torch.randint(5, 50, (4, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    (text,) = [str(w.message) for w in caught if "curvature" in str(w.message) or "vmap" in str(w.message)]
    lines = text.splitlines()
    assert 2 <= len(lines) <= 4
    assert all(len(line) < 300 for line in lines)
    told = {reasons.without_detail(row.note) for row in optimizer.plan() if row.source == "batch"}
    assert told <= {value for key, value in vars(reasons).items() if key.isupper()}
    assert not any("performance drop" in str(w.message) for w in caught)
