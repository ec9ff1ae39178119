"""The least that a step without a refresh can cost: the GEMMs of its directions, and torch's SGD.

The plan says which GEMMs those are: with d the curved dimension in blocks of p and D the other one, an inverse is
multiplied with the gradient (d p D), or U^T, the core and U one after the other where U has r columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ngplus
from ngplus.lab.bench.problems import PROBLEMS
from ngplus.lab.bench.record import Setting, Taken
from ngplus.lab.bench.timing import Stopwatch, Turn, take_turns
from ngplus.lab.bench.training import FIRST_ORDER, NGPLUS, Contender

Product = Callable[[], None]


def measure(setting: Setting) -> Taken:
    """Steps without a pass between them, on the gradients of one batch, beside the bare work on tensors of the same
    shapes."""
    problem = PROBLEMS["resnet"](setting.quick)
    contender = Contender(problem, "ngplus", {**NGPLUS, "update_every": 10**6})
    contender.train(Stopwatch(), "first")  # the refresh; no step after it makes another
    optimizer: Any = contender.optimizer
    products = [product for row in optimizer.plan() for product in products_of(row)]
    turns: dict[str, Turn] = {"ngplus": _timed("ngplus.step", optimizer.step), "gemm": _timed("gemm", _all(products))}
    for kind in ("foreach", "fused"):
        sgd = torch.optim.SGD(_like(contender.model.parameters()), **FIRST_ORDER["sgd"], **{kind: True})
        turns[kind] = _timed(kind, sgd.step)
    numbers = {"problem": problem.title, "step_flops": sum(row.step_flops for row in optimizer.plan())}
    return Taken(take_turns(turns, setting.repeats, warmup=2, say=setting.say), numbers)


def products_of(row: ngplus.PlanRow) -> list[Product]:
    """The GEMMs of one matrix, each into memory that is there already."""
    m, n = row.shape
    left = row.side == "left"
    d, other = (m, n) if left else (n, m)
    blocks = row.blocks // row.groups
    p = -(-d // blocks)
    # The stack of blocks; one that is not full is counted as full.
    gradient = torch.randn(row.blocks, p, other) if left else torch.randn(row.blocks, other, p)
    out = torch.empty_like(gradient)
    if row.solver != "woodbury":
        inverse = torch.randn(row.blocks, p, p)
        return [_gemm(inverse, gradient, out) if left else _gemm(gradient, inverse, out)]
    rank = woodbury_rank(row, d, other)
    factor, core = torch.randn(row.blocks, p, rank), torch.randn(row.blocks, rank, rank)
    if left:
        thin, cored = torch.empty(row.blocks, rank, other), torch.empty(row.blocks, rank, other)
        return [_gemm(factor.mT, gradient, thin), _gemm(core, thin, cored), _gemm(factor, cored, out)]
    thin, cored = torch.empty(row.blocks, other, rank), torch.empty(row.blocks, other, rank)
    return [_gemm(gradient, factor, thin), _gemm(thin, core, cored), _gemm(cored, factor.mT, out)]


def woodbury_rank(row: ngplus.PlanRow, d: int, other: int) -> int:
    """r of the plan's FLOPs, 4 d r D + 2 r^2 D for each of the groups and blocks: the positive root."""
    flops = row.step_flops / other / row.groups
    blocks = row.blocks // row.groups
    return round((((4 * d) ** 2 + 8 * blocks * flops) ** 0.5 - 4 * d) / (4 * blocks))


def _gemm(a: Tensor, b: Tensor, out: Tensor) -> Product:
    if len(a) == 1:
        a, b, out = a[0], b[0], out[0]

    def product() -> None:
        torch.matmul(a, b, out=out)

    return product


def _all(products: list[Product]) -> Product:
    def run() -> None:
        for product in products:
            product()

    return run


def _timed(name: str, work: Callable[[], object]) -> Turn:
    def turn(watch: Stopwatch) -> None:
        with torch.no_grad(), watch.time(name):
            work()

    return turn


def _like(parameters: Any) -> list[Tensor]:
    """Parameters of the same shapes with gradients."""
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    return copies
