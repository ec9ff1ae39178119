"""Kills a training process (SIGKILL) at random moments and goes on: is the end the same, bit for bit?

    python tools/reliability/kills.py --kills 100

Every kill is a run of its own, with a checkpoint after each step, so that many kills hit the writing of one. What is
left behind is resumed to the end and compared with a run that nobody killed: parameters, the optimizer's state and the
curve.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import tensorboard  # noqa: F401 - here, so that the kills find no process that is still importing it

from ngplus.lab import loop, runs
from ngplus.lab.runs import Config

# the task that the tests of the training loop have, too
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "lab"))
from regression import Regression as Small

STEPS = 30


def config(optimizer: str) -> Config:
    return Config(
        workload="small", preset="small", optimizer=optimizer, hyper={}, seed=0, steps=STEPS, batch_size=16,
        evaluate_every=5, target=0.0, measure="loss", higher_is_better=False, warmup=3,
    )  # fmt: skip


def start(folder: Path, optimizer: str) -> int:
    """A process of its own that trains in the folder, or goes on there; forked, so that torch is imported once."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        loop.run(config(optimizer), Small(), folder, resume=True, checkpoint_every=1)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(folder: Path, optimizer: str) -> None:
    _, status = os.waitpid(start(folder, optimizer), 0)
    if status != 0:
        raise RuntimeError(f"the run in {folder} did not end well: {status}")


def ending(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """What counts: the last checkpoint but for its clock, and the curve but for its clock."""
    held = torch.load(folder / "checkpoint.pt", weights_only=True)
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in runs.read_metrics(folder / "metrics.jsonl")]
    return {key: value for key, value in held.items() if key != "seconds"}, rows


def same(a: Any, b: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def wait_for(path: Path, times: int, seconds: float) -> None:
    """Until the file has been written so often, or that much time has gone by."""
    seen: set[int] = set()
    end = time.monotonic() + seconds
    while len(seen) < times and time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.0005)


def kill_many(kills: int, seed: int, root: Path, optimizer: str = "ngadam") -> dict[str, int]:
    """Counts: kills made, kills that left a file half written, kills before the first checkpoint, and those whose
    end differs from that of the run that nobody killed."""
    torch.set_num_threads(1)
    generator = random.Random(seed)
    begun = time.monotonic()
    finish(root / "whole", optimizer)
    length = time.monotonic() - begun
    whole = ending(root / "whole")
    found = {"kills": 0, "while writing": 0, "before the first checkpoint": 0, "different": 0}
    attempt = 0
    while found["kills"] < kills:
        attempt += 1
        folder = root / f"run{attempt}"
        process = start(folder, optimizer)
        if attempt % 2:  # any moment, the beginning included
            time.sleep(generator.uniform(0.0, length))
        else:  # a little after some checkpoint: the next step, or the writing of the next checkpoint
            wait_for(folder / "checkpoint.pt", generator.randrange(1, STEPS), 10 * length)
            time.sleep(generator.uniform(0.0, 2 * length / STEPS))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if not os.WIFSIGNALED(status):  # it had ended before
            continue
        found["kills"] += 1
        found["while writing"] += any(folder.glob(".*.part"))
        found["before the first checkpoint"] += not (folder / "checkpoint.pt").exists()
        finish(folder, optimizer)
        found["different"] += not same(ending(folder), whole)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", default="ngadam")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = kill_many(arguments.kills, arguments.seed, Path(root), arguments.optimizer)
    print(json.dumps(found))
    return 1 if found["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
