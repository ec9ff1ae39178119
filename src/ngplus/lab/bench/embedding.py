"""A large embedding with sparse gradients: 10,000,000 rows of 64, of which a batch touches 10,000."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ngplus.lab import optimizers
from ngplus.lab.bench.processes import in_process
from ngplus.lab.bench.record import Setting, Taken
from ngplus.lab.bench.timing import Stopwatch, Times, Turn, take_turns
from ngplus.lab.bench.training import NGADAM, NGPLUS
from ngplus.lab.optimizer_wrappers import Trainer

WIDTH, SAMPLES, LOOKUPS = 64, 1000, 10
HYPER = {"ngplus": NGPLUS, "ngadam": NGADAM}


class Table:
    """The embedding, and a batch of 1,000 samples that look up ten rows each, all different."""

    def __init__(self, rows: int) -> None:
        weight = torch.empty(rows, WIDTH).fill_(0.01)  # filled: a page that nobody wrote to takes no memory
        self.model = nn.Embedding(rows, WIDTH, sparse=True, _weight=weight)
        generator = torch.Generator().manual_seed(0)
        spread = torch.arange(SAMPLES * LOOKUPS) * (rows // (SAMPLES * LOOKUPS))
        self.index = spread[torch.randperm(len(spread), generator=generator)].reshape(SAMPLES, LOOKUPS)
        self.target = torch.randn(SAMPLES, WIDTH, generator=generator)

    def loss(self) -> Tensor:
        error = self.model(self.index).sum(1) - self.target
        return error.square().sum(1).mean()

    def optimizer(self, name: str, every: int) -> Trainer:
        if name == "sgd":  # without momentum, which a sparse gradient does not get from NG+ either
            return torch.optim.SGD(self.model.parameters(), lr=1e-5)
        return optimizers.get(name).make(self.model, {**HYPER[name], "update_every": every})


def measure(setting: Setting) -> Taken:
    """All optimizers on one table, in turn; then the peak memory of each in a process of its own."""
    rows = 20_000 if setting.quick else 10_000_000
    times = _times(rows, setting)
    peaks = {}
    for name in ("sgd", *HYPER):
        setting.say(f"peak memory: {name}")
        peaks[name] = in_process("embedding", optimizer=name, rows=rows, every=2)
    return Taken(times, {"rows": rows, "width": WIDTH, "touched": SAMPLES * LOOKUPS, "peaks": peaks})


def _times(rows: int, setting: Setting) -> Times:
    table = Table(rows)
    sgd = table.optimizer("sgd", 0)
    turns: dict[str, Turn] = {"sgd": lambda watch: _train(table, sgd, watch, "sgd")}
    for name in HYPER:
        turns[name] = _with_refresh(rows, table, name)
    return take_turns(turns, setting.repeats, warmup=2, say=setting.say)


def _with_refresh(rows: int, table: Table, name: str) -> Turn:
    """On the same weights, in a module of its own, so that its capture does not watch the others' passes."""
    own = Table.__new__(Table)
    own.model = nn.Embedding(rows, WIDTH, sparse=True, _weight=table.model.weight)
    own.index, own.target = table.index, table.target
    optimizer = own.optimizer(name, 2)

    def turn(watch: Stopwatch) -> None:
        for kind in ("refresh", "plain"):
            _train(own, optimizer, watch, f"{name}.{kind}")

    return turn


def _train(table: Table, optimizer: Trainer, watch: Stopwatch, name: str) -> None:
    with watch.time(f"{name}.pass"):
        optimizer.zero_grad()
        table.loss().backward()
    with watch.time(f"{name}.step"):
        optimizer.step()
