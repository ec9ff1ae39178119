"""Times the training steps of the chosen settings in a file of runs that an earlier version of ``ngplus sweep`` made.

``ngplus sweep --timed`` does so for files of this version. Let nothing else run.

    python tools/time_results.py docs/results/standard.jsonl
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ngplus.lab import settings, workloads
from ngplus.lab.study import TUNING_SEED
from ngplus.lab.sweep import numbers, timing
from ngplus.lab.sweep.plan import Job
from ngplus.lab.sweep.rows import TRIAL, read
from ngplus.lab.sweep.tables import tasks_of

PRESET = "standard"
OTHER_PROGRAMS = 0.2  # cores that they may use


def main(out: Path) -> None:
    rows = numbers.of_today(read(out)[0])
    for name in tasks_of(rows):
        workload = workloads.get(name)
        size = workload.presets[PRESET]
        jobs = []
        for one in numbers.standings(rows, name):
            hyper = one.runs[0].hyper
            config = settings.configure(workload, PRESET, size, one.name, seed=TUNING_SEED, hyper=hyper)
            jobs.append(Job(name, size, TRIAL, hyper, config))
        timing.measure(jobs, out, Path(os.environ["NGPLUS_DATA"]), OTHER_PROGRAMS, print)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
