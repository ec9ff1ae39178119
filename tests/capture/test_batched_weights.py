"""Weights [E, m, n] of modules without a rule: E matrices, as the weights of all experts in one parameter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.steps import PAPER
from ngplus.baselines import KFAC, SENG

E, M, N = 3, 4, 5


class Heads(nn.Module):
    """A matrix for each head, by torch.bmm: every sample has a part in all of them."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, M, N))
        self.bias = nn.Parameter(torch.randn(E, M)) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [samples, E, N]
        y = torch.einsum("sen,emn->sem", x, self.weight)
        return y if self.bias is None else y + self.bias


class Experts(nn.Module):
    """As in transformers: rows are routed to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down_proj = nn.Linear(N, E), nn.Parameter(torch.randn(E, M, N))

    def forward(self, x: Tensor) -> Tensor:
        expert = self.gate(x).argmax(-1)
        out = x.new_zeros(len(x), M)
        for e in range(E):
            rows = (expert == e).nonzero().flatten()
            out = out.index_add(0, rows, x[rows] @ self.down_proj[e].mT)
        return out


class Kernel(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3))
        self.__dict__.update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv1d(x, self.weight)


class OwnConv1d(Kernel):
    pass


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_samples_that_use_all_matrices_are_exact(double: None, side: str, bias: bool) -> None:
    model, x = Heads(bias), torch.randn(7, E, N)
    optimizer = ngplus.NGPlus(model, lr=0.5, momentum=0.0, damping=0.3, **{**PAPER, "side": side})
    params = list(model.parameters())
    grads = [torch.autograd.grad(model(row[None]).square().sum(), params) for row in x]
    stack = torch.stack([torch.cat([g.reshape(E, M, -1) for g in each], dim=-1) for each in grads])
    curvature = ref.gfim(stack, side)
    before = [p.detach().clone() for p in params]
    model(x).square().sum((1, 2)).mean().backward()
    optimizer.step()
    row = optimizer.plan()["weight"]
    assert (row.groups, row.shape, row.source) == (E, (M, N + bias), "vmap")
    assert ref.relative_error(optimizer.curvature("weight").matrix, curvature) < 1e-12
    moved = [(b - p.detach()).reshape(E, M, -1) / 0.5 for b, p in zip(before, params, strict=True)]
    assert ref.relative_error(torch.cat(moved, dim=-1), ref.direction(stack.mean(0), curvature, side, 0.3)) < 1e-10


@pytest.mark.parametrize("make", [ngplus.NGPlus, ngplus.NGAdam, KFAC, SENG])
def test_routed_rows_have_mini_batch_curvature_by_matrix(make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Experts()
    optimizer = make(model, lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(9, N)).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    row = optimizer.plan()["down_proj"]
    assert (row.groups, row.shape, row.source) == (E, (M, N), "batch")


def test_ngadam_steps_each_matrix_as_if_it_were_alone(double: None) -> None:
    class Apart(nn.Module):
        def __init__(self, stack: Tensor) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(N, M, bias=False) for _ in stack)
            for part, weight in zip(self.parts, stack, strict=True):
                part.weight.data = weight.clone()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([part(x[:, e]) for e, part in enumerate(self.parts)], dim=1)

    one = Heads()
    apart = Apart(one.weight.detach())
    steps = [(model, ngplus.NGAdam(model, lr=0.1)) for model in (one, apart)]
    for _ in range(3):
        x = torch.randn(7, E, N)
        for model, optimizer in steps:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    wanted = torch.stack([part.weight for part in apart.parts])
    assert ref.relative_error(one.weight.detach(), wanted.detach()) < 1e-12


@pytest.mark.parametrize(
    ("module", "groups", "shape"),
    [
        (Kernel(), 6, (4, 3)),  # nothing says that it is a convolution
        (Kernel(kernel_size=3), 1, (6, 12)),
        (OwnConv1d(), 1, (6, 12)),
        (nn.Conv1d(4, 6, 3, bias=False), 1, (6, 12)),
    ],
    ids=["unknown", "kernel_size", "class", "torch"],
)
def test_kernels_of_convolutions_are_no_stacks(module: nn.Module, groups: int, shape: tuple[int, int]) -> None:
    for make in (ngplus.NGPlus, ngplus.NGAdam):
        row = make(copy.deepcopy(module)).plan()["weight"]
        assert (row.groups, row.shape) == (groups, shape)


def test_without_the_module_the_name_decides() -> None:
    stack, kernel = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(6, 4, 3))
    named = [("layers.0.mlp.experts.up", stack), ("stem.weight", kernel)]
    plan = ngplus.NGAdam(named).plan()
    assert [(row.groups, row.shape) for row in plan] == [(3, (4, 5)), (1, (6, 12))]


def test_a_leading_dimension_of_one_is_no_stack() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Parameter(torch.zeros(1, 7, N)), nn.Linear(N, 2)

    assert ngplus.NGAdam(Positions()).plan()["table"].groups == 1


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    shape = {"Mixtral": (48, 16), "GptOss": (16, 48)}[name]
    for make in (ngplus.NGPlus, ngplus.NGAdam):
        row = make(copy.deepcopy(model)).plan()["model.layers.0.mlp.experts.gate_up_proj"]
        assert (row.groups, row.shape) == (4, shape)
