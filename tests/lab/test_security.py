"""No network, and no path out of the folder: what the commands may do with what they are given."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("plotly")
pytest.importorskip("typer")

from typer.testing import CliRunner

from ngplus.lab.cli import app
from ngplus.lab.workloads import DataError
from ngplus.lab.workloads.files import Folder

HOSTILE = 'run "><script>alert(1)</script> $(touch pwned) `id`; \x1b[31m'


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every connection is an error, and is noted even where somebody catches it."""
    tried: list[Any] = []

    def refuse(*arguments: Any, **options: Any) -> Any:
        tried.append(arguments)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


def test_commands_never_use_the_network(no_network: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    small = ["--steps", "2", "--batch-size", "8", "--evaluate-every", "1"]
    for command in (
        ["train", "digits", *small, "--out", "runs/a"],
        ["plan", "digits"],
        ["report", "runs", "--no-png", "--out", "page.html"],
        ["train", "qm9", *small, "--data", str(tmp_path)],  # data that is not there is not fetched, but asked for
    ):
        result = run(app, command)
        assert result.exit_code == (2 if "qm9" in command else 0), (command, result.output)
    assert no_network == []


def test_hostile_folder_names_are_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run's folder, on the terminal and in the page: text, and neither markup nor a command."""
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "1", "--batch-size", "8", "--evaluate-every", "1"]
    result = CliRunner().invoke(app, ["train", "digits", *small, "--out", HOSTILE])
    assert result.exit_code == 0, result.output
    assert "\x1b[31m" not in result.output
    result = CliRunner().invoke(app, ["report", HOSTILE, "--no-png", "--out", "page.html", "--title", HOSTILE])
    assert result.exit_code == 0, result.output
    page = Path("page.html").read_text()
    assert "<script>alert" not in page
    assert not Path("pwned").exists()
    assert {path.name for path in tmp_path.iterdir()} == {'run "><script>alert(1)<', "page.html"}


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/passwd", "link/secret", "link"])
def test_no_path_leaves_the_data_folder(name: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "data", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("x")
    (tmp_path / "secret").write_text("x")
    (root / "link").symlink_to(outside)
    folder = Folder("test", root.resolve(), "")
    with pytest.raises(DataError, match="leads out"):
        folder.path(name)
    with pytest.raises(DataError, match="leads out"):
        folder.require(name)
