"""Every example runs as its docstring says, by python or by torchrun on some ranks, and prints what the site shows."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ngplus
from helpers.project import ROOT, same_but_for_numbers

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def command_of(example: Path) -> list[str]:
    """The line of the docstring that begins with python or torchrun."""
    text = ast.get_docstring(ast.parse(example.read_text())) or ""
    lines = re.findall(rf"^ *((?:python|torchrun) .*examples/{example.name}.*)$", text, re.M)
    assert lines, f"{example.name} does not say how it is run"
    program, *rest = shlex.split(lines[0])
    modules = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    return [*modules[program], *rest]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(ngplus.__file__).parents[1]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command_of(example), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = ROOT / "examples" / "output" / f"{example.stem}.txt"
    if "NGPLUS_WRITE_OUTPUT" in os.environ:
        times = r"'(train_runtime|train_samples_per_second|train_steps_per_second)': '[^']*', "
        shown.write_text(re.sub(times, "", done.stdout))
    assert same_but_for_numbers(done.stdout, shown.read_text()), f"{shown.name} is old; NGPLUS_WRITE_OUTPUT=1 writes it"
