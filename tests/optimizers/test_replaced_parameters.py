"""Parameters that were resized or replaced after the optimizer was made: an error, or one warning; no false alarm."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as pruning

from helpers.training import Method, both, floats, train_to_zero


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


@both
def test_a_parameter_of_another_shape_is_an_error(kind: Method) -> None:
    """transformers' resize_token_embeddings gives the same parameter more rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
    optimizer = kind(model, lr=0.01, update_every=5)

    def step(words: int) -> None:
        optimizer.zero_grad()
        model(torch.randint(words, (8, 5))).square().mean().backward()
        optimizer.step()

    step(6)
    model[0].weight.data = torch.randn(9, 4)
    model[0].num_embeddings = 9
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'0.weight' had the shape \(6, 4\).*\(9, 4\) now.*create a new optimizer"):
        step(9)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer = kind(model, lr=0.01)
    step(9)
    model[0].weight.requires_grad_(False)  # of a frozen one it does not matter
    model[0].weight.data = torch.randn(5, 4)
    step(5)


@both
def test_resized_token_embeddings(kind: Method) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = kind(model)
    model.resize_token_embeddings(24)

    def step() -> None:
        model(input_ids=torch.randint(24, (4, 5))).logits.square().mean().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="resize_token_embeddings"):
        step()


@both
def test_a_replaced_parameter_is_told_once(kind: Method, recwarn: pytest.WarningsRecorder) -> None:
    model = net()
    optimizer = kind(model, lr=0.01, update_every=2)
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    model[2] = nn.Linear(6, 3)
    train_to_zero(model, optimizer, floats(8, 5), range(4))
    told = [str(w.message) for w in recwarn if "were replaced after" in str(w.message)]
    assert len(told) == 1
    assert "model's 2.weight, 2.bias were replaced" in told[0]


@both
@pytest.mark.parametrize("before", [False, True], ids=["registered", "removed"])
def test_a_parametrization_since_is_told_once(kind: Method, before: bool, recwarn: pytest.WarningsRecorder) -> None:
    model = net()
    if before:
        parametrizations.weight_norm(model[0])
    optimizer = kind(model, lr=0.01, update_every=2)
    if before:
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    else:
        parametrizations.weight_norm(model[0])
    train_to_zero(model, optimizer, floats(8, 5), range(4))
    told = [str(w.message) for w in recwarn if "were replaced after the optimizer was created" in str(w.message)]
    assert len(told) == 1
    assert "The model's 0." in told[0]
    assert "create a new optimizer" in told[0]


def freeze(model: nn.Sequential) -> nn.Module:
    model[0].requires_grad_(False)
    return model


def tie(model: nn.Sequential) -> nn.Module:
    model[2].weight = model[0].weight
    return model


def prune(model: nn.Sequential) -> nn.Module:
    pruning.l1_unstructured(model[0], "weight", 0.5)
    return model


def parametrize(model: nn.Sequential) -> nn.Module:
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    return model


def parametrize_and_undo(model: nn.Sequential) -> nn.Module:
    parametrize(model)
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    return model


def remove_a_layer(model: nn.Sequential) -> nn.Module:
    del model[2]
    return model


def move_a_layer(model: nn.Sequential) -> nn.Module:
    """As merging LoRA's weights moves the base layer."""
    model[0] = nn.Sequential(model[0])
    return model


def replace_and_freeze(model: nn.Sequential) -> nn.Module:
    model[2] = nn.Linear(6, 6).requires_grad_(False)
    return model


def cast(model: nn.Sequential) -> nn.Module:
    return model.double()


CHANGES = [
    freeze, tie, prune, parametrize, parametrize_and_undo, remove_a_layer, move_a_layer, replace_and_freeze, cast,
    partial(torch.compile, backend="eager"), nn.DataParallel, torch.func.functional_call,
]  # fmt: skip


@both
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: getattr(f, "__name__", "compile"))
def test_no_false_alarm_of_a_replaced_parameter(kind: Method, change: Any, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = kind(model, lr=0.01, update_every=1)
    train_to_zero(model, optimizer, floats(8, 6), range(2))
    x = torch.randn(8, 6)
    if change is torch.func.functional_call:
        swapped = {name: p * 1.0 for name, p in model.named_parameters()}
        torch.func.functional_call(model, swapped, (x,)).square().mean().backward()
        optimizer.step()
    else:
        changed = change(model)
        x = x.double() if change is cast else x
        for _ in range(2):
            optimizer.zero_grad()
            changed(x).square().mean().backward()
            optimizer.step()
    assert not [str(w.message) for w in recwarn if "were replaced" in str(w.message)]
