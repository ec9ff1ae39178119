"""The ngplus command as tests call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ngplus.lab.cli import app

SHORT = ["--steps", "6", "--evaluate-every", "3", "--batch-size", "16", "--set", "width=4"]


def ngplus(*arguments: str, code: int = 0) -> str:
    """What the command says, without line breaks."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


def document(*arguments: str, code: int = 0) -> Any:
    """What the command prints with --json, and nothing else, on standard output."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def trials_of(name: str) -> list[dict[str, Any]]:
    """Of an optimizer, as they are in the settings that were tuned."""
    held = json.loads(Path("presets/digits.json").read_text())["presets"]["small"][name]
    return list(held["tuning"]["trials"])
