"""Many steps with a refresh in each: do memory, open files and time stay as they are?

    python tools/reliability/load.py --steps 100000

Prints, for each tenth of the steps, the resident memory, the open files and the processor's seconds. Memory is compared
from the end of the first tenth on, when all buffers have been made.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ngplus


def resident() -> int:
    """Bytes of memory in use by this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def train(steps: int, parts: int = 10, optimizer_type: Any = ngplus.NGAdam) -> list[dict[str, float]]:
    """A row for each part of the steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = optimizer_type(model, lr=1e-3, update_every=1)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    rows = []
    for part in range(parts):
        begun = time.process_time()
        for _ in range(steps // parts):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        seconds = time.process_time() - begun
        rows.append({"part": part + 1, "megabytes": resident() / 2**20, "handles": handles(), "seconds": seconds})
    assert optimizer.health().good
    return rows


def growth(rows: list[dict[str, float]]) -> float:
    """Of the memory, from the end of the first part to the end of the last."""
    return rows[-1]["megabytes"] / rows[0]["megabytes"] - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--optimizer", choices=("NGAdam", "NGPlus"), default="NGAdam")
    arguments = parser.parse_args()
    rows = train(arguments.steps, optimizer_type=getattr(ngplus, arguments.optimizer))
    for row in rows:
        print(json.dumps(row))
    half = len(rows) // 2
    slower = sum(row["seconds"] for row in rows[half:]) / sum(row["seconds"] for row in rows[:half])
    left = rows[-1]["handles"] - rows[0]["handles"]
    print(f"memory {growth(rows):+.3%}, open files {left:+.0f}, second half / first half of the time {slower:.3f}")
    return 0 if growth(rows) < 0.01 and left <= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
