"""Training loops in which it is easy to take other rows for samples: what plan() calls per-sample is exact."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ngplus
from helpers.certain import assert_certain, compare
from helpers.steps import EXACT, Model, N, data, loss_fn
from ngplus.capture import reasons

pytestmark = pytest.mark.usefixtures("double")

WIDTH, LENGTH, WORDS = 4, 5, 11


def words() -> Tensor:
    return torch.randint(WORDS, (N, LENGTH), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------------ routing and masks


class Switch(nn.Module):
    """Each row goes to one expert; every expert gets as many rows as divide into samples."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top, self.router = top, nn.Linear(WIDTH, 3)
        self.experts, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, place = (chosen == i).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return self.head((rows + out).unflatten(0, (len(x), -1)).tanh().mean(1))


class SwitchByMask(Switch):
    """As of Switch Transformers: expert by expert written to where its mask is."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = x.clone()
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            out[mask] = expert(x[mask]) * weights[mask][:, None]
        return self.head(out.mean(1))


@pytest.mark.parametrize(
    ("kind", "top", "head"), [(Switch, 1, "sample"), (Switch, 2, "sample"), (SwitchByMask, 1, "batch")]
)
def test_routing(kind: type[Switch], top: int, head: str) -> None:
    x, y = data(LENGTH, WIDTH)
    model = kind(top)
    sources = {"router": "sample", "experts": "batch", "head": head}
    assert_certain(model, lambda m, of: loss_fn(m(x[of]), y[of]) * len(of) / N, **sources)


@pytest.mark.parametrize("each", [True, False], ids=["as many each", "unlike numbers"])
def test_head_on_masked_tokens(each: bool) -> None:
    ids = words()
    masked = torch.zeros(N, LENGTH, dtype=torch.bool)
    masked[:, 1:3] = True
    if not each:
        masked[0] = True
        masked[1] = False
        masked[2, 1] = False

    def forward(m: Any, ids: Tensor, masked: Tensor) -> Tensor:
        h = m.body(m.words(ids)).tanh()
        return m.head(h[masked])

    model = Model(forward, words=nn.Embedding(WORDS, WIDTH), body=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, WORDS))

    def loss(m: nn.Module, of: list[int]) -> Tensor:
        logits, targets = m(ids[of], masked[of]), ids[of][masked[of]]
        return F.cross_entropy(logits, targets, reduction="sum") / N if len(targets) else logits.sum() * 0

    assert_certain(model, loss, words="sample", body="sample", head="batch")


# ------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("length", [LENGTH, N, 2 * N])
@pytest.mark.parametrize("flat", [False, True])
def test_time_major_layers_of_a_batch_first_model(length: int, flat: bool) -> None:
    x, y = data(length, WIDTH)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh().transpose(0, 1)
        h = h.flatten(0, 1) if flat else h
        h = m.inner(h).tanh()
        h = h.unflatten(0, (-1, len(x))) if flat else h
        return m.head(m.encoder(h)).mean(0)

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0)
    model = Model(forward, first=nn.Linear(WIDTH, WIDTH), inner=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 3),
                  encoder=layer)  # fmt: skip
    known = dict.fromkeys(("first", "inner", "encoder", "head"), "sample")
    assert_certain(model, lambda m, of: loss_fn(m(x[of]), y[of]) * len(of) / N, **known)


def test_time_major_inputs_without_batch_dim() -> None:
    """The output has another first dimension than the inputs, so that those are no samples."""
    x, y = data(LENGTH, WIDTH)
    model = Model(lambda m, x: m.b(m.a(x).tanh().mean(0)), a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, 3))
    assert_certain(model, lambda m, of: loss_fn(m(x[of].transpose(0, 1)), y[of]) * len(of) / N, a="batch", b="batch")


def test_a_mask_as_likely_as_the_batch() -> None:
    """The loss is the output, and a mask that comes first has other rows than the samples."""
    ids = words()

    def forward(m: Any, mask: Tensor, ids: Tensor) -> Tensor:
        h = m.words(ids)
        scores = (m.query(h) @ h.mT + mask).softmax(-1)
        return m.out(scores @ h).square().sum() / N

    model = Model(forward, words=nn.Embedding(WORDS, WIDTH), query=nn.Linear(WIDTH, WIDTH), out=nn.Linear(WIDTH, 3))
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    assert_certain(model, lambda m, of: m(mask, ids[of]))


# ------------------------------------------------------------------------------------------------ several calls


def test_reinforce_with_a_call_for_each_sample() -> None:
    states, rewards = data(WIDTH, outputs=1)

    def loss(m: nn.Module, of: list[int]) -> Tensor:
        parts = []
        for i in of:
            policy = torch.distributions.Categorical(logits=m(states[i]))
            parts.append(-policy.log_prob(torch.tensor(i % 3)) * rewards[i, 0])
        return torch.stack(parts).sum() / N

    assert_certain(nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3)), loss)


def test_siamese() -> None:
    """Two calls of one network for each pair."""
    x, z = data(WIDTH, outputs=WIDTH)

    def loss(m: Any, of: list[int]) -> Tensor:
        return (m(x[of]) - m(z[of])).square().sum() / N

    assert_certain(nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3)), loss)


def test_siamese_in_one_call() -> None:
    x, z = data(WIDTH, outputs=WIDTH)

    def forward(m: Any, x: Tensor, z: Tensor) -> Tensor:
        both = m.a(torch.cat([x, z])).tanh()
        first, second = m.b(both).chunk(2)
        return first - second

    model = Model(forward, a=nn.Linear(WIDTH, 4), b=nn.Linear(4, 3))
    assert_certain(model, lambda m, of: m(x[of], z[of]).square().sum() / N, a="sample", b="sample")


def test_gan() -> None:
    """The discriminator's step has two calls; the generator's goes through it."""
    noise, real = data(3, outputs=WIDTH)
    generator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, WIDTH))
    discriminator = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))

    def of_discriminator(m: nn.Module, of: list[int]) -> Tensor:
        fake = generator(noise[of]).detach()
        return (F.softplus(-m(real[of])) + F.softplus(m(fake))).sum() / N

    def of_generator(m: nn.Module, of: list[int]) -> Tensor:
        return F.softplus(-discriminator(m(noise[of]))).sum() / N

    assert_certain(discriminator, of_discriminator)
    discriminator.zero_grad()
    assert_certain(generator, of_generator, **{"0": "sample", "2": "sample"})


def test_contrastive() -> None:
    """Each sample's loss depends on all others: its curvature is N times what its own rows add to the gradient."""
    x, z = data(WIDTH, outputs=WIDTH)

    def forward(m: Any, x: Tensor, z: Tensor) -> Tensor:
        return F.normalize(m.a(x), dim=1) @ F.normalize(m.b(z), dim=1).T

    model = Model(forward, a=nn.Linear(WIDTH, 3), b=nn.Linear(WIDTH, 3))
    gradients = []
    for i in range(N):
        own = torch.zeros(N, 1)
        own[i] = 1.0
        one = copy.deepcopy(model)

        def rows(h: Tensor, own: Tensor = own) -> Tensor:
            return h * own + h.detach() * (1 - own)

        logits = F.normalize(rows(one.a(x)), dim=1) @ F.normalize(rows(one.b(z)), dim=1).T
        F.cross_entropy(logits, torch.arange(N)).mul(N).backward()
        gradients.append({name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None})
    optimizer = ngplus.NGPlus(model, **{**EXACT, "lr": 0.0, "solver": "dense"})
    F.cross_entropy(model(x, z), torch.arange(N)).backward()
    optimizer.step()
    compare(optimizer, gradients, {"a": "sample", "b": "sample"})


# ------------------------------------------------------------------------------------------------ machinery of torch


def test_gradient_accumulation() -> None:
    """Micro-batches of unlike sizes, the sum of whose losses is the mean."""
    x, y = data(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3))
    before = copy.deepcopy(model)
    optimizer = ngplus.NGPlus(model, **{**EXACT, "lr": 0.0, "solver": "dense"})
    for of in ([0, 1, 2], [3, 4, 5]):
        (loss_fn(model(x[of]), y[of]) / 2).backward()
    optimizer.step()
    gradients = []
    for i in range(N):
        one = copy.deepcopy(before)
        loss_fn(one(x[i : i + 1]), y[i : i + 1]).backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    compare(optimizer, gradients, {"0": "sample", "2": "sample"})


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointing(reentrant: bool, time_first: bool) -> None:
    x, y = data(LENGTH, WIDTH)

    def block(m: Any, h: Tensor) -> Tensor:
        return m.b(m.a(h).tanh()).tanh()

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        h = h.transpose(0, 1) if time_first else h
        h = checkpoint(lambda h: block(m, h), h, use_reentrant=reentrant)
        return m.head(h.mean(0 if time_first else 1))

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "a", "b")}
    model = Model(forward, **layers, head=nn.Linear(WIDTH, 3))
    known = dict.fromkeys([*layers, "head"], "sample")
    assert_certain(model, lambda m, of: loss_fn(m(x[of]), y[of]) * len(of) / N, **known)


@pytest.mark.parametrize("time_first", [False, True])
def test_compiled(time_first: bool) -> None:
    torch._dynamo.reset()
    x, y = data(LENGTH, WIDTH)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x.transpose(0, 1) if time_first else x).tanh()
        return m.b(h.mean(0 if time_first else 1))

    model = Model(forward, a=nn.Linear(WIDTH, 4), b=nn.Linear(4, 3))
    compiled = torch.compile(model, backend="eager")
    assert_certain(model, lambda m, of: loss_fn(m(x[of]), y[of]) * len(of) / N, compiled, a="sample", b="sample")
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ autograd.grad


def before(model: nn.Module, loss: Tensor) -> None:
    """As to log the gradient's norm."""
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def several_before(model: nn.Module, loss: Tensor) -> None:
    """As to weigh two losses by their gradients."""
    for part in (loss / 3, 2 * loss / 3):
        torch.autograd.grad(part, list(model.parameters()), retain_graph=True)
    loss.backward()


def assigned(model: nn.Module, loss: Tensor) -> None:
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = grad


def after(model: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()))


def between(model: nn.Module, loss: Tensor) -> None:
    (loss / 2).backward(retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    (loss / 2).backward()


def sum_assigned(model: nn.Module, loss: Tensor) -> None:
    params = list(model.parameters())
    both = [torch.autograd.grad(part, params, retain_graph=True) for part in (loss / 3, 2 * loss / 3)]
    for p, *grads in zip(params, *both, strict=True):
        p.grad = sum(grads)


@pytest.mark.parametrize(
    ("backward", "source"),
    [(before, "sample"), (several_before, "sample"), (assigned, "sample"), (after, "batch"), (between, "batch"),
     (sum_assigned, "batch")],
)  # fmt: skip
def test_gradients_that_autograd_grad_returns(backward: Any, source: str) -> None:
    """Those that do not get into .grad are not counted. Where that is not certain, curvature is mini-batch."""
    x, y = data(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    gradients = []
    for i in range(N):
        one = copy.deepcopy(model)
        loss_fn(one(x[i : i + 1]), y[i : i + 1]).backward()
        gradients.append({name: p.grad for name, p in one.named_parameters()})
    optimizer = ngplus.NGPlus(model, **{**EXACT, "lr": 0.0})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, loss_fn(model(x), y))
            optimizer.step()
    compare(optimizer, gradients, dict.fromkeys("02", source))
    notes = {row.note for row in optimizer.plan()}
    assert notes == ({""} if source == "sample" else {reasons.RETURNED})


def test_a_graph_that_second_derivatives_keep() -> None:
    """As of MAML: the first pass keeps its graph, and the second one, through other weights, goes through it."""
    x, y = data(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    optimizer = ngplus.NGPlus(model, **{**EXACT, "lr": 0.0})
    grads = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), grads, strict=True)}
    loss_fn(torch.func.functional_call(model, fast, (x,)), y).backward()
    with pytest.warns(UserWarning, match=reasons.SEVERAL_CALLS):
        optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"batch"}


def test_sets_of_as_many_rows_as_there_are_sets() -> None:
    """The rows of a set are not the samples of an output in which they were summed up."""
    sets, y = data(N, WIDTH)
    model = Model(lambda m, sets: torch.stack([m.rows(x).tanh().amax(0) for x in sets]), rows=nn.Linear(WIDTH, 3))
    assert_certain(model, lambda m, of: loss_fn(m([sets[i] for i in of]), y[of]) * len(of) / N, rows="batch")
