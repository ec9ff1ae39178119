"""How the cost of a step grows with the number of rows, where they are cut into blocks of 256."""

from __future__ import annotations

import torch
from torch import nn

import ngplus
from ngplus.lab.bench.record import Setting, Taken
from ngplus.lab.bench.timing import Stopwatch, Turn, take_turns
from ngplus.lab.bench.training import NGPLUS

COLUMNS, SAMPLES, PLAIN = 1024, 256, 5


def measure(setting: Setting) -> Taken:
    """A Linear layer of m rows and 1,024 columns; one step with a refresh, then five without, for each m in turn."""
    block, columns = (16, 32) if setting.quick else (256, COLUMNS)
    rows = [block * 2**i for i in range(3 if setting.quick else 6)]
    turns = {str(m): _turn(m, columns, block) for m in rows}
    times = take_turns(turns, setting.repeats, say=setting.say)
    return Taken(times, {"rows": rows, "columns": columns, "block_size": block, "samples": SAMPLES})


def _turn(m: int, columns: int, block: int) -> Turn:
    torch.manual_seed(0)
    model, x, y = nn.Linear(columns, m, bias=False), torch.randn(SAMPLES, columns), torch.randn(SAMPLES, m)
    optimizer = ngplus.NGPlus(
        model, **{**NGPLUS, "side": "left", "solver": "dense", "block_size": block, "update_every": PLAIN + 1}
    )

    def turn(watch: Stopwatch) -> None:
        optimizer.zero_grad()
        with watch.time(f"{m}.refresh.pass"):
            (model(x) - y).square().sum(1).mean().backward()
        with watch.time(f"{m}.refresh.step"):
            optimizer.step()
        with watch.time(f"{m}.plain.step", PLAIN):
            for _ in range(PLAIN):
                optimizer.step()

    return turn
