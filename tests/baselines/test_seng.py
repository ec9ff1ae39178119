"""SENG against brute force: vec(G_i) by a loop over samples, dense formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import layer_cases as layers
from helpers import reference as ref
from helpers.steps import LAMBDA, plain, update_of
from ngplus.baselines import SENG
from ngplus.baselines import seng_columns as columns
from ngplus.fisher.factors import Lookup, Outer, Rows

pytestmark = pytest.mark.usefixtures("one_thread")


def seng_case(case: layers.Case, dtype: torch.dtype, **options: Any) -> None:
    torch.manual_seed(0)
    model = case.model().to(dtype).train()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
    target = torch.rand(case.samples, 1, dtype=dtype) + 0.5
    take = case.take or layers.each
    samples = [layers.doubled((take(inputs, i), target[i : i + 1])) for i in range(case.samples)]
    grads = ref.per_sample_gradients(copy.deepcopy(model).double(), layers.squared, samples)
    optimizer = plain(SENG, model, **{**case.options, **options})
    update = update_of(model, optimizer, lambda: layers.squared(model(*inputs), target))
    for names, lay in case.units:
        stack = torch.stack([lay(*(g[name] for name in names)) for g in grads])
        got = lay(*(update[name].double() for name in names))
        wanted = ref.woodbury(stack, stack.mean(0), options.get("damping", LAMBDA))
        assert ref.relative_error(got, wanted) < (1e-6 if dtype == torch.float64 else 1e-3), names
        assert optimizer.plan()[names[0]].source in ("sample", "vmap")


@pytest.mark.parametrize("case", layers.CASES, ids=lambda case: case.name)
def test_seng_is_exact(case: layers.Case) -> None:
    seng_case(case, torch.float64)


@pytest.mark.parametrize("case", layers.CASES[::7], ids=lambda case: case.name)
def test_seng_is_exact_in_single_precision(case: layers.Case) -> None:
    # (g - U z) / lambda loses |U|^2 / lambda roundings, whatever its form: take a damping that leaves some digits.
    seng_case(case, torch.float32, damping=300.0)


@pytest.mark.parametrize("case", layers.CASES[::5], ids=lambda case: case.name)
def test_a_sketch_that_keeps_everything_is_exact(case: layers.Case) -> None:
    seng_case(case, torch.float64, sketch=1000)


def parts() -> dict[str, Any]:
    """Parts of U for a 5 x 6 matrix: few and many positions, lookups, gradients as they are."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return {
            "one": Outer(torch.randn(1, 4, 1, 5), torch.randn(1, 4, 1, 6)),
            "two": Outer(torch.randn(1, 3, 2, 5), torch.randn(1, 3, 2, 6)),
            "many": Outer(torch.randn(1, 4, 40, 5), torch.randn(1, 4, 40, 6)),
            "lookup": Lookup(torch.randint(5, (4, 3)), torch.randn(4, 3, 6), 5),
            "long": Lookup(torch.randint(5, (2, 50)), torch.randn(2, 50, 6), 5),
            "rows": Rows(torch.randn(1, 4, 5, 6)),
        }
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("chunk_bytes", [1, 2000, 2**20])
def test_products_of_all_kinds_of_parts(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(columns, "CHUNK_BYTES", chunk_bytes)
    dense = {name: part.gradients(slice(None), torch.float64).flatten(2)[0] for name, part in parts().items()}
    gradient, z = torch.randn(1, 5, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for name, a in parts().items():
        assert torch.allclose(columns.inner_with(a, gradient), dense[name] @ gradient.flatten())
        sum_of = (z[: a.samples] @ dense[name]).view(1, 5, 6)
        assert torch.allclose(columns.combine(a, z[: a.samples]), sum_of)
        for other, b in parts().items():
            assert torch.allclose(columns.inner_products(a, b), dense[name] @ dense[other].T), (name, other)


def test_factors_are_kept_where_they_are_smaller() -> None:
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 20))
    optimizer = plain(SENG, model)
    update_of(model, optimizer, lambda: model(torch.randn(7, 2, 6, 6)).square().mean())
    plan = optimizer.plan()
    assert plan["0.weight"].form == "rows"  # 36 positions of 8 + 19 numbers each, for 152
    assert plan["3.weight"].form == "outer"
    assert plan["3.weight"].state_bytes < 4 * (7 * (20 + 289) + 7 * 7 + 10)


def test_seng_takes_a_sub_sample_of_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    start = copy.deepcopy(model)
    optimizer = plain(SENG, model, samples=3, seed=5)
    update = update_of(model, optimizer, lambda: (model(x) - y).square().sum(1).mean())
    samples = [(x[i : i + 1], y[i : i + 1]) for i in range(8)]
    grads = ref.per_sample_gradients(start, lambda out, y: (out - y).square().sum(1).mean(), samples)
    stack = torch.stack([ref.rows(g["weight"], g["bias"]) for g in grads])
    chosen = torch.randperm(8, generator=torch.Generator().manual_seed(5 * 1_000_003))[:3]
    wanted = ref.woodbury(stack[chosen], stack.mean(0), LAMBDA)
    assert ref.relative_error(ref.rows(update["weight"], update["bias"]), wanted) < 1e-6


def test_the_sketch_solves_the_smaller_problem() -> None:
    """Dense Omega: z = argmin |Omega U z - Omega g|^2 + lambda |z|^2, and the direction is (g - U z) / lambda."""
    torch.manual_seed(0)
    model = nn.Linear(9, 7).double()
    x, y = torch.randn(5, 9).double(), torch.randn(5, 7).double()
    start = copy.deepcopy(model)
    optimizer = plain(SENG, model, sketch=4)
    update = update_of(model, optimizer, lambda: (model(x) - y).square().sum(1).mean())
    state = optimizer.state[model.weight]
    omega_m = torch.eye(7).double()[state["kept_rows"]] * (7 / 4) ** 0.5
    omega_n = torch.eye(10).double()[state["kept_cols"]] * (10 / 4) ** 0.5
    omega = torch.kron(omega_m, omega_n)
    samples = [(x[i : i + 1], y[i : i + 1]) for i in range(5)]
    grads = ref.per_sample_gradients(start, lambda out, y: (out - y).square().sum(1).mean(), samples)
    u = torch.stack([ref.rows(g["weight"], g["bias"]).flatten() for g in grads], dim=1) / 5**0.5
    g = u.sum(1) / 5**0.5
    z = torch.linalg.solve(u.T @ omega.T @ omega @ u + LAMBDA * torch.eye(5).double(), u.T @ omega.T @ omega @ g)
    wanted = ((g - u @ z) / LAMBDA).view(1, 7, 10)
    assert ref.relative_error(ref.rows(update["weight"], update["bias"]), wanted) < 1e-6


def test_the_sketched_gram_is_unbiased() -> None:
    part = parts()["many"]
    exact = columns.gram([(0, part)])
    mean = torch.zeros_like(exact)
    for seed in range(400):
        kept = columns.choose_sketch([(0, part)], 3, seed)
        mean += columns.gram([(0, columns.sketched(part, *kept))]) / 400
    assert ref.relative_error(mean, exact) < 0.1


@pytest.mark.parametrize("sketch", [None, 2])
def test_sparse_embeddings_go_as_dense_ones(sketch: int | None) -> None:
    """Over refreshes and the steps in between, whose gradients touch other rows than U."""

    def final(sparse: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 4, sparse=sparse), nn.Linear(4, 2)).double()
        optimizer = plain(SENG, model, update_every=3, sketch=sketch, lr=1e-3, damping=3.0)
        for k in range(5):
            index = torch.randint(0, 30, (6, 3), generator=torch.Generator().manual_seed(k))
            update_of(model, optimizer, lambda index=index: (model(index).sum((1, 2)) - 1).square().mean())
            assert not sparse or model[0].weight.grad.is_sparse
        return model[0].weight.detach()

    assert ref.relative_error(final(True), final(False)) < 1e-12


def test_samples_with_different_numbers_of_rows() -> None:
    torch.manual_seed(0)
    index = torch.tensor([0, 2, 0, 1, 2, 2, 0, 2])
    model, x, target = nn.Linear(4, 3).double(), torch.randn(8, 4).double(), torch.randn(3, 3).double()

    def losses() -> Tensor:
        out = torch.zeros(3, 3).double().index_add(0, index, model(x).tanh())
        return (out - target).square().sum(1)

    each = [torch.autograd.grad(loss, [model.weight, model.bias], retain_graph=True) for loss in losses()]
    stack = torch.stack([torch.cat([w, b[:, None]], 1) for w, b in each])
    optimizer = plain(SENG, model, sample_index=lambda rows: index)
    update = update_of(model, optimizer, lambda: losses().mean())
    got = torch.cat([update["weight"], update["bias"][:, None]], 1)
    assert ref.relative_error(got, ref.woodbury(stack, stack.mean(0), LAMBDA)) < 1e-10
