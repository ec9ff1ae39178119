"""What needs a fresh process: peak memory, and the time of an import.

``python -m ngplus.lab.bench.processes NAME THREADS JSON`` is one such process; it prints its result as JSON.
"""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngplus.lab.bench.record import Setting, Taken
from ngplus.lab.bench.timing import Stopwatch, Turn, take_turns

Numbers = dict[str, Any]


def peak_bytes() -> int:
    """The most memory that this process has had resident.

    Not ru_maxrss where there is another source: on Linux a new process begins with its parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def in_process(name: str, **options: Any) -> Numbers:
    """The result of one of the functions below, in a new process with as many threads as this one."""
    import torch

    command = [sys.executable, "-m", __name__, name, str(torch.get_num_threads()), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"The process that measures {name} failed:\n{done.stderr[-2000:]}")
    result: Numbers = json.loads(done.stdout.splitlines()[-1])
    return result


# ---------------------------------------------------------------------------------------------- peak memory of a step

# SGD; NG+ whose one refresh is that of the first, small step; NG+ whose last step is a refresh as well. In both forms.
MEMORY: dict[str, Numbers] = {
    "sgd": {"optimizer": "sgd", "every": None},
    "plain": {"optimizer": "ngplus", "every": 10**6},
    "refresh": {"optimizer": "ngplus", "every": 3},
    "ngadam-plain": {"optimizer": "ngadam", "every": 10**6},
    "ngadam-refresh": {"optimizer": "ngadam", "every": 3},
}


def memory(setting: Setting) -> Taken:
    """On ResNet-50; the quick one on the MLP, which is sooner imported."""
    problem = "mlp" if setting.quick else "resnet"
    peaks: dict[str, list[int]] = {name: [] for name in MEMORY}
    for number in range(setting.repeats):
        for name, options in MEMORY.items():
            setting.say(f"round {number + 1} of {setting.repeats}: {name}")
            peaks[name].append(in_process("steps", problem=problem, quick=setting.quick, **options)["peak"])
    return Taken({}, {"peaks": peaks})


def steps(problem: str, optimizer: str, every: int | None, quick: bool) -> Numbers:
    """The first step, always a refresh, has a batch that takes no memory; then three with the whole batch, of which the
    last is a refresh where ``every`` is 3."""
    from ngplus.lab.bench.problems import PROBLEMS
    from ngplus.lab.bench.training import FIRST_ORDER, NGADAM, NGPLUS, Contender

    chosen = PROBLEMS[problem](quick)
    hyper = FIRST_ORDER.get(optimizer) or {"ngadam": NGADAM, "ngplus": NGPLUS}[optimizer]
    contender = Contender(chosen, optimizer, {**hyper, **({} if every is None else {"update_every": every})})
    chosen.small_loss(contender.model).backward()
    contender.optimizer.step()
    for _ in range(3):
        contender.train(Stopwatch(), "")
    return {"peak": peak_bytes()}


# ---------------------------------------------------------------------------------------------- the time of an import


def imports(setting: Setting) -> Taken:
    """``import torch`` and ``import ngplus`` (which imports torch), each in a process of its own.

    Both from bytecode: pip compiles what it installs, a checkout is compiled here.
    """
    compileall.compile_dir(Path(__file__).parents[2], quiet=2)
    turns = {name: _import_turn(name) for name in ("torch", "ngplus")}
    return Taken(take_turns(turns, setting.repeats, warmup=0 if setting.quick else 1, say=setting.say))


def _import_turn(name: str) -> Turn:
    def turn(watch: Stopwatch) -> None:
        code = (
            "import time; w, c = time.perf_counter(), time.process_time()\n"
            f"import {name}\n"
            "print(time.perf_counter() - w, time.process_time() - c)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        wall, cpu = map(float, done.stdout.split())
        watch.add(name, wall, cpu)

    return turn


# ---------------------------------------------------------------------------------------------- the embedding's memory


def embedding(optimizer: str, rows: int, every: int) -> Numbers:
    """The peak of four steps on the sparse table."""
    from ngplus.lab.bench.embedding import Table

    table = Table(rows)
    made = table.optimizer(optimizer, every)
    for _ in range(4):
        made.zero_grad()
        table.loss().backward()
        made.step()
    return {"peak": peak_bytes()}


CHILDREN: dict[str, Callable[..., Numbers]] = {"steps": steps, "embedding": embedding}

if __name__ == "__main__":
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(CHILDREN[sys.argv[1]](**json.loads(sys.argv[3]))))
