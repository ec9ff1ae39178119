"""What KFAC and SENG promise alike: state, refreshes, accumulation, mixed precision, errors."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.steps import LAMBDA, plain, update_of
from helpers.training import all_finite, equal, hooks_of, loss_of, small_net, through_file, train
from ngplus.baselines import KFAC, SENG

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = pytest.mark.parametrize("kind", [KFAC, SENG])


KINDS = [(KFAC, {}), (KFAC, {"beta": 0.0}), (SENG, {}), (SENG, {"sketch": 3, "samples": 3})]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_saved_state_goes_on_bit_for_bit(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"lr": 0.01, "update_every": 2, **options}
    model = small_net(dtype=dtype)
    optimizer = kind(model, **options)
    train(model, optimizer, range(3))  # between two refreshes
    other = small_net(1, dtype)
    other.load_state_dict(model.state_dict())
    loaded = kind(other, **options)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    pickled = pickle.loads(pickle.dumps(optimizer))
    train(model, optimizer, range(3, 7))
    train(other, loaded, range(3, 7))
    assert equal(other, model)
    for again in (copied, pickled):
        train(again._model, again, range(3, 7))
        assert equal(again._model, model)


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
        wanted = ref.woodbury(torch.stack([ref.rows(g["weight"], g["bias"]) for g in grads]), gradient, LAMBDA)
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
    pieces = [lambda s=slice(i, i + 2): loss_of(other, 0, s) / 2 for i in (0, 2)]
    parts = update_of(other, plain(kind, other), *pieces)
    assert all(ref.relative_error(parts[name], whole[name]) < 1e-8 for name in whole)


@BOTH
def test_a_sum_over_the_samples(kind: Any) -> None:
    """The same curvature, and a gradient as many times as long as there are samples."""
    model, other = small_net(dtype=torch.float64), small_net(dtype=torch.float64)
    mean = update_of(model, plain(kind, model), lambda: loss_of(model, 0))
    total = update_of(other, plain(kind, other, loss_reduction="sum"), lambda: 4 * loss_of(other, 0))
    assert all(ref.relative_error(total[name], 4 * mean[name]) < 1e-8 for name in mean)


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
    assert all_finite(model)


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
    with pytest.warns(UserWarning, match=r"(?s)rnn.*token") as caught:
        update = update_of(model, optimizer, lambda: model(x).square().mean())
    assert len(caught) == 1
    g = model.token.grad
    assert torch.allclose(update["token"] / 1e-3, g / (LAMBDA + g.square().sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_of(model, optimizer, lambda: model(x).square().mean())
    assert optimizer.plan()["layer.weight"].note  # used outside of its module, too


@BOTH
def test_bad_input_is_refused_and_changes_nothing(kind: Any) -> None:
    model = small_net()
    with pytest.raises(ValueError, match="model="):
        kind(model.parameters())
    with pytest.raises(ValueError, match="no parameters"):
        kind(nn.ReLU())
    optimizer = kind(model)
    before = copy.deepcopy(model)
    (loss_of(model, 0) * float("inf")).backward()
    with pytest.warns(ngplus.HealthWarning, match="not finite"):
        optimizer.step()
    assert equal(before, model)


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
    assert all_finite(model)


def test_hooks_go_with_the_optimizer() -> None:
    model = small_net()
    optimizer = KFAC(model)
    assert hooks_of(model)
    del optimizer
    gc.collect()
    assert not hooks_of(model)


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
