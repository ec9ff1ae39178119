"""KFAC and SENG against brute force: Kronecker factors and vec(G_i) by a loop over samples, dense formulas."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference as ref
import test_layers as layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from ngplus.baselines import KFAC, SENG
from ngplus.baselines import seng as seng_module
from ngplus.factors import Lookup, Outer, Rows

pytestmark = pytest.mark.usefixtures("one_thread")
LAMBDA = 0.3
BOTH = pytest.mark.parametrize("kind", [KFAC, SENG])


def plain(kind: Any, model: Any, **options: Any) -> Any:
    """An optimizer whose update is the direction."""
    return kind(model, **{"lr": 1.0, "momentum": 0.0, "damping": LAMBDA, **options})


def update_of(model: nn.Module, optimizer: Any, *losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """What a step takes away from each parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    for loss in losses:
        loss().backward()
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------------------ SENG


def woodbury(stack: Tensor, gradient: Tensor, damping: float = LAMBDA) -> Tensor:
    """(lambda I + 1/S sum_i vec(G_i) vec(G_i)^T)^-1 vec(G), by a dense solve. ``stack`` is [samples, ...]."""
    flat = stack.flatten(1)
    fisher = flat.T @ flat / len(flat) + damping * torch.eye(flat.shape[1]).to(flat)
    return torch.linalg.solve(fisher, gradient.flatten()).view_as(gradient)


def seng_case(case: layers.Case, dtype: torch.dtype, **options: Any) -> None:
    torch.manual_seed(0)
    model = case.model().to(dtype).train()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
    target = torch.rand(case.samples, 1, dtype=dtype) + 0.5
    take = case.take or layers.each
    samples = [layers._double((take(inputs, i), target[i : i + 1])) for i in range(case.samples)]
    grads = ref.per_sample_gradients(copy.deepcopy(model).double(), layers.squared, samples)
    optimizer = plain(SENG, model, **{**case.options, **options})
    update = update_of(model, optimizer, lambda: layers.squared(model(*inputs), target))
    for names, lay in case.units:
        stack = torch.stack([lay(*(g[name] for name in names)) for g in grads])
        got = lay(*(update[name].double() for name in names))
        wanted = woodbury(stack, stack.mean(0), options.get("damping", LAMBDA))
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
    monkeypatch.setattr(seng_module, "CHUNK_BYTES", chunk_bytes)
    dense = {name: part.gradients(slice(None), torch.float64).flatten(2)[0] for name, part in parts().items()}
    gradient, z = torch.randn(1, 5, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for name, a in parts().items():
        assert torch.allclose(seng_module.against(a, gradient), dense[name] @ gradient.flatten())
        sum_of = (z[: a.samples] @ dense[name]).view(1, 5, 6)
        assert torch.allclose(seng_module.combine(a, z[: a.samples]), sum_of)
        for other, b in parts().items():
            assert torch.allclose(seng_module.inner_products(a, b), dense[name] @ dense[other].T), (name, other)


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
    wanted = woodbury(stack[chosen], stack.mean(0))
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
    exact = seng_module.gram_of([(0, part)])
    mean = torch.zeros_like(exact)
    for seed in range(400):
        kept = seng_module._choose([(0, part)], 3, seed)
        mean += seng_module.gram_of([(0, seng_module._sketched(part, *kept))]) / 400
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


# ------------------------------------------------------------------------------------------------------ KFAC


def kronecker_reference(
    model: nn.Module, module: nn.Module, unfold: Callable[[Tensor], Tensor], x: Tensor, loss_fn: Any, approx: str
) -> tuple[Tensor, Tensor]:
    """A and G of a module, sample by sample. ``unfold`` makes an input to [positions, columns]."""
    a_sum, g_sum, places = 0.0, 0.0, 0
    for i in range(len(x)):
        calls: list[tuple[Tensor, Tensor]] = []
        handle = module.register_forward_hook(lambda _, args, out, calls=calls: calls.append((args[0], out)))
        loss = loss_fn(model(x[i : i + 1]), i)
        handle.remove()
        outs = torch.autograd.grad(loss, [out for _, out in calls])
        spatial = isinstance(module, nn.Conv2d)
        a = torch.cat([unfold(into) for into, _ in calls]).detach()
        a = torch.cat([a, torch.ones(len(a), 1).to(a)], dim=1)
        g = torch.cat([(g.flatten(2).transpose(1, 2) if spatial else g).reshape(-1, g.shape[1 if spatial else -1])
                       for g in outs])  # fmt: skip
        if approx == "reduce":
            a, g = a.mean(0, keepdim=True), g.sum(0, keepdim=True)
        a_sum, g_sum, places = a_sum + a.T @ a, g_sum + g.T @ g, places + len(a)
    return a_sum / places, g_sum / len(x)


KRONECKER = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear-3d": (lambda: nn.Linear(4, 3), (5, 6, 4)),
    "linear-twice": (layers.Twice, (5, 3, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (5, 2, 6, 5)),
    "shared-conv": (layers.SharedConv, (5, 3, 6, 6)),
}


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", KRONECKER)
def test_kfac_is_exact(name: str, approx: str) -> None:
    torch.manual_seed(0)
    make, shape = KRONECKER[name]
    model, x = make().double(), torch.randn(*shape).double()
    target = torch.rand(len(x), 1).double()
    prefix, module = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d))
    prefix = f"{prefix}." if prefix else ""
    if isinstance(module, nn.Conv2d):

        def unfold(a: Tensor) -> Tensor:
            return F.unfold(a, 3, padding=module.padding, stride=module.stride)[0].T

    else:

        def unfold(a: Tensor) -> Tensor:
            return a.reshape(-1, a.shape[-1])

    def sample_loss(output: Tensor, i: int) -> Tensor:
        return layers.squared(output, target[i : i + 1])

    a, g = kronecker_reference(model, module, unfold, x, sample_loss, approx)
    optimizer = plain(KFAC, model, approx=approx)
    update = update_of(model, optimizer, lambda: layers.squared(model(x), target))
    got = optimizer.factors(prefix + "weight")
    assert ref.relative_error(got.input, a) < 1e-10
    assert ref.relative_error(got.output, g) < 1e-10
    gradient = ref.rows(module.weight.grad, module.bias.grad)[0]
    damped = [f + LAMBDA**0.5 * torch.eye(len(f)).double() for f in (g, a)]
    # [W b] row by row: vec(G^-1 W A^-1) = (G x A)^-1 vec(W)
    wanted = torch.linalg.solve(torch.kron(*damped), gradient.flatten()).view_as(gradient)
    assert ref.relative_error(ref.rows(update[prefix + "weight"], update[prefix + "bias"])[0], wanted) < 1e-6


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_kfac_has_the_factors_of_curvlinops(approx: str, reduction: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 5)).double()
    x, y = torch.randn(7, 2, 6, 6).double(), torch.randint(5, (7,))
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    theirs = curvlinops.KFACLinearOperator(
        model, loss_fn, list(model.parameters()), [(x, y)], fisher_type="empirical", kfac_approx=approx,
        separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    theirs.compute_kronecker_factors()
    optimizer = plain(KFAC, model, approx=approx, loss_reduction=reduction)
    update_of(model, optimizer, lambda: loss_fn(model(x), y))
    for name in ("0", "3"):
        ours = optimizer.factors(f"{name}.weight")
        # Curvlinops' Fisher of a summed loss is the sum over the samples; ours is the mean.
        samples = 1 if reduction == "mean" else len(x)
        assert ref.relative_error(ours.input, theirs._input_covariances[name]) < 1e-12
        assert ref.relative_error(ours.output * samples, theirs._gradient_covariances[name]) < 1e-12


def test_grouped_convolutions_have_factors_for_each_group() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 6, 3, groups=2).double(), torch.randn(5, 4, 5, 5).double()
    halves = [nn.Conv2d(2, 3, 3).double() for _ in range(2)]
    for i, half in enumerate(halves):
        half.weight.data, half.bias.data = model.weight.data.chunk(2)[i].clone(), model.bias.data.chunk(2)[i].clone()
    update = update_of(model, plain(KFAC, model), lambda: model(x).square().flatten(1).sum(1).mean())
    for i, half in enumerate(halves):
        part = x.chunk(2, dim=1)[i]
        alone = update_of(half, plain(KFAC, half), lambda h=half, p=part: h(p).square().flatten(1).sum(1).mean())
        assert ref.relative_error(update["weight"].chunk(2)[i], alone["weight"]) < 1e-12
        assert ref.relative_error(update["bias"].chunk(2)[i], alone["bias"]) < 1e-12


NO_KRONECKER = ["embedding-right", "embedding-sparse", "bag-mean-rows", "layer_norm", "group_norm", "tied", "scalar"]


@pytest.mark.parametrize("case", [c for c in layers.CASES if c.name in NO_KRONECKER], ids=lambda case: case.name)
def test_what_has_no_kronecker_factors_gets_the_matrix_of_ngplus(case: layers.Case) -> None:
    updates = []
    for kind, options in ((KFAC, {}), (ngplus.NGPlus, {"scaling": "inverse"})):
        torch.manual_seed(0)
        model, inputs = case.model().double(), case.inputs()
        inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        optimizer = plain(kind, model, **options)
        target = torch.ones(case.samples, 1).double()
        update = update_of(model, optimizer, lambda m=model, i=inputs, t=target: layers.squared(m(*i), t))
        updates.append([update[name] for name in case.units[0][0]])
    for ours, theirs in zip(*updates, strict=True):
        assert ref.relative_error(ours, theirs) < 1e-10


def test_the_factors_are_averaged_over_refreshes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    xs = [torch.randn(6, 4).double() for _ in range(4)]
    optimizer = plain(KFAC, model, beta=0.8, update_every=2)
    wanted = None
    for k, x in enumerate(xs):
        update_of(model, optimizer, lambda x=x: model(x).square().sum(1).mean())
        if k % 2 == 0:
            bias = torch.cat([x, torch.ones(6, 1).double()], 1)
            fresh = bias.T @ bias / 6
            wanted = fresh if wanted is None else 0.8 * wanted + 0.2 * fresh
        assert torch.allclose(optimizer.factors("weight").input, wanted)
    other = plain(KFAC, model, beta=0.0)
    update_of(model, other, lambda: model(xs[0]).square().mean())
    with pytest.raises(RuntimeError, match="beta"):
        other.factors("weight")


# ------------------------------------------------------------------------------------------------------ both


def small_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    stack = [nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3)]
    return nn.Sequential(*stack).to(dtype)


def loss_of(model: nn.Module, k: int, samples: slice = slice(None)) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    x, y = torch.randn(6, 1, 4, 4, generator=generator), torch.randint(3, (6,), generator=generator)
    return F.cross_entropy(model(x[samples].to(next(model.parameters()).dtype)), y[samples])


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for k in steps:
        optimizer.zero_grad()
        loss_of(model, k).backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


KINDS = [(KFAC, {}), (KFAC, {"beta": 0.0}), (SENG, {}), (SENG, {"sketch": 3, "samples": 4})]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_saved_state_goes_on_bit_for_bit(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"lr": 0.01, "update_every": 2, **options}
    model = small_net(dtype=dtype)
    optimizer = kind(model, **options)
    train(model, optimizer, range(3))  # between two refreshes
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = small_net(1, dtype)
    other.load_state_dict(model.state_dict())
    loaded = kind(other, **options)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(optimizer)
    pickled = pickle.loads(pickle.dumps(optimizer))
    train(model, optimizer, range(3, 7))
    train(other, loaded, range(3, 7))
    assert same(other, model)
    for again in (copied, pickled):
        train(again._model, again, range(3, 7))
        assert same(again._model, model)


@BOTH
def test_the_curvature_stays_between_two_refreshes(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    start = copy.deepcopy(model)
    x, y = torch.randn(2, 6, 4).double(), torch.randn(2, 6, 3).double()

    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        return (output - y).square().sum(1).mean()

    optimizer = plain(kind, model, update_every=3)
    for k in range(2):
        update = update_of(model, optimizer, lambda k=k: loss_fn(model(x[k]), y[k]))
    gradient = ref.rows(model.weight.grad, model.bias.grad)[0]
    if kind is SENG:
        grads = ref.per_sample_gradients(start, loss_fn, [(x[0, i : i + 1], y[0, i : i + 1]) for i in range(6)])
        wanted = woodbury(torch.stack([ref.rows(g["weight"], g["bias"]) for g in grads]), gradient)
    else:
        a = torch.cat([x[0], torch.ones(6, 1).double()], 1)
        g = 2 * (start(x[0]) - y[0]).detach()
        left, right = (LAMBDA**0.5 * torch.eye(f.shape[1]).double() + f.T @ f / 6 for f in (g, a))
        wanted = torch.linalg.inv(left) @ gradient @ torch.linalg.inv(right)
    assert ref.relative_error(ref.rows(update["weight"], update["bias"])[0], wanted) < 1e-6


@BOTH
def test_micro_batches_count_as_one_batch(kind: Any) -> None:
    model, other = small_net(dtype=torch.float64), small_net(dtype=torch.float64)
    whole = update_of(model, plain(kind, model), lambda: loss_of(model, 0))
    pieces = [lambda s=slice(i, i + 2): loss_of(other, 0, s) / 3 for i in (0, 2, 4)]
    parts = update_of(other, plain(kind, other), *pieces)
    assert all(ref.relative_error(parts[name], whole[name]) < 1e-8 for name in whole)


@BOTH
def test_a_sum_over_the_samples(kind: Any) -> None:
    """The same curvature, and a gradient as many times as long as there are samples."""
    model, other = small_net(dtype=torch.float64), small_net(dtype=torch.float64)
    mean = update_of(model, plain(kind, model), lambda: loss_of(model, 0))
    total = update_of(other, plain(kind, other, loss_reduction="sum"), lambda: 6 * loss_of(other, 0))
    assert all(ref.relative_error(total[name], 6 * mean[name]) < 1e-8 for name in mean)


@BOTH
def test_the_loss_scale_of_mixed_precision_is_taken_out(kind: Any) -> None:
    models = small_net(), small_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for scaled, model in enumerate(models):
        optimizer = kind(model, lr=0.01, update_every=2)
        for k in range(3):
            optimizer.zero_grad()
            if scaled:
                scaler.scale(loss_of(model, k)).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss_of(model, k).backward()
                optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert ref.relative_error(p.detach(), q.detach()) < 1e-4


@BOTH
def test_other_uses(kind: Any) -> None:
    """Groups, a frozen layer, a closure, a learning-rate scheduler and a damping schedule, maximize."""
    model = small_net()
    model[2].weight.requires_grad_(False)
    weights = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": vectors}]
    optimizer = kind(groups, lr=0.01, model=model, maximize=True, update_every=1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ngplus.schedules.ExponentialDamping(optimizer, rate=0.5).step()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -loss_of(model, 0)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] > losses[0]
    assert len(optimizer.plan()) == 4
    model[2].weight.requires_grad_(True)  # another layout from here on
    optimizer.step(closure)
    assert all(p.isfinite().all() for p in model.parameters())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.token = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.layer(x + self.token) @ self.layer.weight)[0]


@BOTH
def test_what_capture_does_not_cover_gets_mini_batch_curvature_and_one_warning(kind: Any) -> None:
    torch.manual_seed(0)
    model = Bare().double()
    optimizer = plain(kind, model, update_every=1, lr=1e-3)
    x = torch.randn(3, 5, 4).double()
    with pytest.warns(UserWarning, match=r"token.*rnn") as caught:
        update = update_of(model, optimizer, lambda: model(x).square().mean())
    assert len(caught) == 1
    g = model.token.grad
    assert torch.allclose(update["token"] / 1e-3, g / (LAMBDA + g.square().sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_of(model, optimizer, lambda: model(x).square().mean())
    assert optimizer.plan()["layer.weight"].note  # used outside of its module, too


@BOTH
@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"damping": -0.1}, {"damping": "auto"}, {"update_every": 0}, {"momentum": float("nan")},
     {"loss_reduction": "none"}, {"batch_dim": -1}],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Invalid (learning rate|" + "|".join(options) + ")"):
        kind(small_net(), **options)


def test_bad_input_is_refused_and_changes_nothing() -> None:
    model = small_net()
    for kind, options in ((KFAC, {"approx": "sum"}), (KFAC, {"beta": 2.0}), (SENG, {"damping": 0.0}),
                          (SENG, {"samples": 0}), (SENG, {"sketch": {"size": 2}})):  # fmt: skip
        with pytest.raises(ValueError, match="Invalid"):
            kind(model, **options)
    with pytest.raises(ValueError, match="model"):
        KFAC(model.parameters())
    with pytest.raises(ValueError, match="no parameters"):
        SENG(nn.ReLU())
    optimizer = SENG(model)
    before = copy.deepcopy(model)
    (loss_of(model, 0) * float("inf")).backward()
    with pytest.warns(ngplus.HealthWarning, match="not finite"):
        optimizer.step()
    assert same(before, model)


@BOTH
@pytest.mark.parametrize("first", [0, 1])
def test_curvature_that_overflows_is_left_out(kind: Any, first: int) -> None:
    """At the first refresh the plain gradient steps in; later the last good curvature stays."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = plain(kind, model, update_every=1, lr=1e-3, damping=1.0)
    for _ in range(first):
        update_of(model, optimizer, lambda: model(torch.randn(5, 4)).square().mean())
    held = {key: x.clone() for key, x in optimizer.state[model.weight].items() if isinstance(x, Tensor)}
    with pytest.warns(UserWarning, match="not finite"):
        update = update_of(model, optimizer, lambda: (model(1e25 * torch.randn(5, 4)) * 1e-15).mean())
    if first:
        assert all(torch.equal(x, optimizer.state[model.weight][key]) for key, x in held.items())
    else:
        assert torch.allclose(update["bias"], 1e-3 * model.bias.grad)
    assert all(p.isfinite().all() for p in model.parameters())


def test_hooks_go_with_the_optimizer() -> None:
    model = small_net()
    optimizer = KFAC(model)
    assert any(m._forward_hooks for m in model.modules())
    del optimizer
    gc.collect()
    assert not any(m._forward_hooks for m in model.modules())


@BOTH
def test_the_digits_are_learned(kind: Any) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    images, labels = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    order = torch.randperm(len(labels))
    held_out = order[1500:]
    optimizer = kind(model)
    for _ in range(120):
        index = order[torch.randint(0, 1500, (64,))]
        optimizer.zero_grad()
        F.cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()
    assert (model(images[held_out]).argmax(1) == labels[held_out]).float().mean() > 0.93
