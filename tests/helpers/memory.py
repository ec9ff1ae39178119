"""The peak memory of a refresh by torch's profiler, which sees all allocations on the CPU, and large layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from helpers.layer_models import Unrolled
from ngplus import NGPlus

Built = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]  # a model, its inputs, and options of NGPlus
Case = Callable[[], Built]
Loop = Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]  # the passes of a step, with the gradient of the output


def one_pass(model: nn.Module, inputs: tuple[Tensor, ...], gradient: Tensor) -> None:
    model(*inputs).backward(gradient)


def retained(model: nn.Module, inputs: tuple[Tensor, ...], gradient: Tensor) -> None:
    """Two passes through one graph."""
    output = model(*inputs)
    output.backward(gradient, retain_graph=True)
    output.backward(gradient)


def accumulated(model: nn.Module, inputs: tuple[Tensor, ...], gradient: Tensor) -> None:
    for *part, own in zip(*(x.chunk(4) for x in (*inputs, gradient)), strict=True):
        model(*part).backward(own)


def peak_bytes(function: Callable[[], object]) -> int:
    """Calls the function, and returns the most bytes that were allocated at once beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        function()
    assert run.profiler is not None
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def refresh_bytes(case: Case, memory: int, loop: Loop = one_pass) -> tuple[int, int, NGPlus]:
    """Returns the peak of a step of SGD, the peak of one of NGPlus with a refresh, and that optimizer."""
    torch.manual_seed(0)
    model, inputs, options = case()
    outputs = model(*inputs)
    gradient = torch.randn_like(outputs) / outputs.numel()
    del outputs

    def step(optimizer: torch.optim.Optimizer) -> None:
        loop(model, inputs, gradient)
        optimizer.step()

    plain = peak_bytes(lambda: step(torch.optim.SGD(model.parameters(), lr=0.0)))
    model.zero_grad()
    optimizer = NGPlus(model, lr=0.0, damping=1.0, solver="dense", refresh_memory=memory, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain, peak_bytes(lambda: step(optimizer)), optimizer


class Own(nn.Module):
    """A layer that no rule knows, with several activations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = F.linear(x, self.weight).tanh()
        return x


class WithIndex(nn.Module):
    """A layer on rows whose sample the second input tells."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            x = x[None]
            return self.layer(x, x, x, need_weights=False)[0][0]
        return self.layer(x)


class Cross(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, need_weights=False)[0]


class TimeMajor(nn.Module):
    """A layer on rows, the first ones of all samples first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.transpose(0, 1).flatten(0, 1))
        return out.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


class Residual(nn.Module):
    """Blocks under autocast, whose norms have float32 outputs."""

    def __init__(self, size: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = x + block(x)
        return x


class Gates(nn.Module):
    """The cell of a GRU by layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(size, 3 * size), nn.Linear(size, 3 * size)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        reset, update, new = self.of_input(x).chunk(3, -1)
        own_reset, own_update, own_new = self.of_state(state).chunk(3, -1)
        update = (update + own_update).sigmoid()
        new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
        return new + update * (state - new)


class Checkpointed(Gates):
    """The same, whose gates are computed again in backward."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return checkpoint(super().forward, x, state, use_reentrant=False)


class TiedWords(nn.Module):
    """A language model whose output layer has the weight of the embedding."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(words, size), nn.Linear(size, words, bias=False)
        self.blocks, self.out.weight = blocks(size), self.words.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.out(self.blocks(self.words(index)))


class Pairs(nn.Module):
    """A network that one call uses for two inputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = blocks(size)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.body(first) - self.body(second)


def blocks(size: int) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(size, size), nn.LayerNorm(size), nn.Tanh())))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.3, self.bias)


def uneven(rows: int, samples: int, first: int) -> Tensor:
    """The samples of rows, of which the first one has the most."""
    rest = torch.randint(1, samples, (rows - first,)).sort().values
    return torch.cat([torch.zeros(first, dtype=torch.long), rest])


def with_index(layer: nn.Module, x: Tensor, samples: int, first: int) -> Built:
    return WithIndex(layer), (x, uneven(len(x), samples, first)), {"sample_index": lambda x, index: index}


def words(*shape: int) -> Tensor:
    return torch.randint(32, shape)


CASES: dict[str, Case] = {
    "batch norm": lambda: (nn.BatchNorm2d(16), (torch.randn(64, 16, 64, 64),), {}),
    "batch norm of rows": lambda: (nn.BatchNorm1d(64), (torch.randn(20_000, 64),), {}),
    "batch norm, sample_index": lambda: with_index(nn.BatchNorm1d(64), torch.randn(60_000, 64), 300, 2000),
    "layer norm, sample_index": lambda: with_index(nn.LayerNorm(64), torch.randn(60_000, 64), 300, 2000),
    "linear, sample_index": lambda: with_index(nn.Linear(64, 64), torch.randn(60_000, 64), 300, 2000),
    "linear, small samples": lambda: with_index(nn.Linear(64, 64), torch.randn(60_000, 64), 9000, 50),
    "linear, time-major rows": lambda: (TimeMajor(nn.Linear(64, 64)), (torch.randn(60, 1000, 64),), {}),
    "linear, scaled weight": lambda: (Scaled(64, 64), (torch.randn(64, 1000, 64),), {}),
    "convolution, sample_index": lambda: with_index(nn.Conv1d(8, 8, 3, padding=1), torch.randn(4000, 8, 128), 200, 300),
    "convolution, several images": lambda: (
        TimeMajor(nn.Conv1d(8, 8, 3, padding=1)),
        (torch.randn(50, 80, 8, 128),),
        {},
    ),
    "table, sample_index": lambda: with_index(nn.Embedding(32, 64), words(60_000), 200, 2000),
    "table, padding": lambda: (nn.Embedding(32, 64, padding_idx=0), (words(64, 1000),), {}),
    "bags": lambda: (nn.EmbeddingBag(32, 64, mode="sum"), (words(60_000, 8),), {}),
    "bags, sample_index": lambda: with_index(nn.EmbeddingBag(32, 64, mode="sum"), words(30_000, 4), 200, 1000),
    "attention, sample_index": lambda: with_index(
        nn.MultiheadAttention(64, 2, batch_first=True), torch.randn(3000, 64), 100, 600
    ),
    "cross attention": lambda: (Cross(128), tuple(torch.randn(400, 20, 128) for _ in range(3)), {}),
    "autocast": lambda: (Residual(64, 6), (torch.randn(64, 1000, 64),), {}),
    "vmap": lambda: (Own(64), (torch.randn(3000, 64),), {}),
}

#: Models and loops in which something waits for other uses of a matrix, or for the step.
WAITING: dict[str, tuple[Case, Loop]] = {
    "gates, unrolled": (lambda: (Unrolled(Gates(64)), (torch.randn(512, 20, 64),), {}), one_pass),
    "gates, unrolled, checkpointed": (lambda: (Unrolled(Checkpointed(64)), (torch.randn(512, 24, 64),), {}), one_pass),
    "GRU cell, unrolled": (lambda: (Unrolled(nn.GRUCell(64, 64)), (torch.randn(512, 20, 64),), {}), one_pass),
    "language model, tied": (lambda: (TiedWords(2000, 64), (torch.randint(2000, (40, 64)),), {}), one_pass),
    "two uses in one call": (lambda: (Pairs(64), (torch.randn(64, 300, 64), torch.randn(64, 300, 64)), {}), one_pass),
    "retained graph": (lambda: (blocks(64), (torch.randn(64, 240, 64),), {}), retained),
    "unrolled, retained graph": (lambda: (Unrolled(Gates(64)), (torch.randn(512, 16, 64),), {}), retained),
    "unrolled, accumulated": (lambda: (Unrolled(Gates(64)), (torch.randn(2048, 20, 64),), {}), accumulated),
}
