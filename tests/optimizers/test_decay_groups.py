"""decay_groups: weight decay on matrices, none on vectors, as in groups made by hand."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.training import assert_same


class Language(nn.Module):
    """A table that is tied to the output, norms, an attention, bare parameters, a bias of two dimensions."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.mix = nn.Parameter(torch.eye(8))
        self.gate_bias = nn.Parameter(torch.zeros(5, 8))
        self.norm = nn.LayerNorm((5, 8))
        self.output = nn.Linear(8, 11)
        self.last = nn.Linear(11, 1)
        if tied:
            self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(5).expand(len(tokens), -1)) + self.token
        x = self.norm(self.layer(x) @ self.mix + self.gate_bias)
        return self.last(torch.tanh(self.output(x)))


MATRICES = {
    "table.weight", "places.weight", "mix", "layer.self_attn.in_proj_weight", "layer.self_attn.out_proj.weight",
    "layer.linear1.weight", "layer.linear2.weight", "last.weight",
}  # fmt: skip


def names(groups: list[dict[str, Any]]) -> dict[float, list[str]]:
    return {group["weight_decay"]: [name for name, _ in group["params"]] for group in groups}


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_what_decays(decay_embeddings: bool) -> None:
    model = Language()
    found = names(ngplus.decay_groups(model, 0.1, decay_embeddings=decay_embeddings))
    tables = {"table.weight", "places.weight"}
    assert set(found[0.1]) == (MATRICES if decay_embeddings else MATRICES - tables)
    every = [name for name, _ in model.named_parameters()]
    assert sorted(found[0.1] + found[0.0]) == sorted(every)  # each once, the tied one, too
    assert found[0.1] == [name for name in every if name in found[0.1]]  # in the order of the model


def test_an_output_that_is_not_tied_is_no_embedding() -> None:
    found = names(ngplus.decay_groups(Language(tied=False), 0.1, decay_embeddings=False))
    assert set(found[0.1]) == {*MATRICES - {"table.weight", "places.weight"}, "output.weight"}


LAYERS = {
    "conv": (lambda: nn.Conv2d(4, 6, 3, groups=2), ["weight"]),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3), ["weight"]),
    "batch norm": (lambda: nn.BatchNorm2d(4), []),
    "norm of images": (lambda: nn.LayerNorm((4, 3, 3)), []),
    "lstm": (lambda: nn.LSTM(3, 2), ["weight_ih_l0", "weight_hh_l0"]),
    "prelu": (lambda: nn.PReLU(4), []),
    "sparse table": (lambda: nn.Embedding(9, 4, sparse=True), []),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), ["parametrizations.weight.original1"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str) -> None:
    make, wanted = LAYERS[kind]
    groups = ngplus.decay_groups(make(), 0.1)
    assert names(groups).get(0.1, []) == wanted
    assert all(group["params"] for group in groups)


@pytest.mark.parametrize("kind", [ngplus.NGPlus, ngplus.NGAdam, torch.optim.AdamW, torch.optim.SGD])
def test_training_equals_that_of_groups_made_by_hand(kind: Any) -> None:
    def trained(by_hand: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Language().double()
        if by_hand:
            params = dict(model.named_parameters())
            groups: Any = [
                {"params": [p for name, p in params.items() if name in MATRICES], "weight_decay": 0.3},
                {"params": [p for name, p in params.items() if name not in MATRICES], "weight_decay": 0.0},
            ]
        else:
            groups = ngplus.decay_groups(model, 0.3)
        beside = {"model": model} if kind.__module__.startswith("ngplus") else {}
        optimizer = kind(groups, lr=0.01, **beside)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(11, (6, 5))).square().mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # no rule for the bare parameters
                optimizer.step()
        return model, optimizer

    (model, optimizer), (other, _) = trained(False), trained(True)
    assert_same(model, other)
    assert optimizer.param_groups[0]["param_names"][0] == "mix"
    if kind is ngplus.NGPlus:
        assert optimizer.plan()["layer.linear1.weight"].source == "sample"
        assert optimizer.plan()["layer.linear1.weight"].parameters == ("layer.linear1.weight", "layer.linear1.bias")


def test_wrapped_models_have_their_plain_names() -> None:
    model = nn.Linear(4, 3)
    wanted = names(ngplus.decay_groups(model, 0.1))
    assert names(ngplus.decay_groups(torch.compile(model), 0.1)) == wanted == {0.1: ["weight"], 0.0: ["bias"]}


def test_a_negative_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid weight_decay: -1"):
        ngplus.decay_groups(nn.Linear(4, 3), -1)
