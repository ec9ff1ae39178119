"""Every example runs as its docstring says: by python, or by torchrun on some ranks."""

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
from helpers.project import ROOT

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
    assert done.stdout.strip(), "an example says what it has done"
