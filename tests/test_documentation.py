"""What the documentation shows runs: the examples of all public names, and the Python blocks of the pages.

A page's Python blocks run in order in one namespace that begins with what a reader has (``READER``). A block after
``<!-- not run: reason -->`` is left out; a block of text after ``<!-- output -->`` is what the block before it prints.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import itertools
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ngplus
from helpers.project import ROOT
from ngplus.capture import reasons

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
FENCE = re.compile(r"(?:<!-- *(?P<mark>not run: .+?|output) *-->\n+)?^(?P<indent> *)```(?P<kind>\w*).*?\n(?P<body>.*?)^ *```", re.M | re.S)  # noqa: E501  # fmt: skip


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every public class and function, by the name that a user writes."""
    rooms = {
        "ngplus": ngplus, "ngplus.layers": ngplus.layers, "ngplus.schedules": ngplus.schedules,
        "ngplus.baselines": ngplus.baselines, "ngplus.online": ngplus.online,
        "ngplus.reference": ngplus.reference,
    }  # fmt: skip
    for place, module in rooms.items():
        for name in module.__all__:
            found = getattr(module, name)
            if not inspect.ismodule(found):
                yield f"{place}.{name}", found


OBJECTS = dict(public_objects())


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Examples register rules and draw random numbers; the next test sees none of it."""
    kept = dict(ngplus.capture.layers.base._RULES)
    torch.manual_seed(0)
    yield
    ngplus.capture.layers.base._RULES.clear()
    ngplus.capture.layers.base._RULES.update(kept)


REASONS = {name: text for name, text in vars(reasons).items() if name.isupper()}


def test_every_reason_for_mini_batch_curvature_is_on_the_page_of_troubles() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(REASONS) > 20
    assert not [text for text in REASONS.values() if f"\n| {text} | " not in page]


def test_every_reason_is_one_of_those_and_each_is_used() -> None:
    """No module has a text of its own, and there is none that no module gives."""
    literal, used = [], set()
    for path in sorted((ROOT / "src" / "ngplus").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[ast.expr] = []
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                names = ("fall_back", "fall_back_at_step", "refuse", "NotPerSample", "with_detail")
                given = node.args[:1] if called != "refuse" else node.args[1:]
                given = given if called in names else []
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") in ("reason", "not_captured"):
                given = [node.value]
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "reasons":
                used.add(node.attr)
            literal += [
                (path.name, expression.value)
                for expression in given
                if isinstance(expression, ast.Constant) and expression.value
            ]
            literal += [(path.name, ast.unparse(part)) for part in given if isinstance(part, ast.JoinedStr)]
    assert not literal
    assert REASONS.keys() <= used


@pytest.mark.parametrize("name", OBJECTS)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    names = {"ngplus": ngplus, "torch": torch, "nn": nn, **vars(sys.modules[OBJECTS[name].__module__])}
    tests = doctest.DocTestFinder(exclude_empty=True).find(OBJECTS[name], name, globs=names)
    own = next(test for test in tests if test.name == name)
    assert own.examples, f"{name} has no example"
    for test in tests:
        said = io.StringIO()
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.write)
        assert not failed, said.getvalue()


@pytest.mark.parametrize("name", [n for n, found in OBJECTS.items() if inspect.isclass(found)])
def test_every_argument_is_described(name: str) -> None:
    """In the docstring's Args, where it has them; they may be in several groups, as in ``Args: Curvature``."""
    found = OBJECTS[name]
    _, *groups = re.split(r"^Args:.*\n", inspect.getdoc(found) or "", flags=re.M)
    if not groups:
        return
    described = "\n".join(groups)
    lines = re.findall(r"^    ([\w, ]+)(?: \([^)]*\))?:", described, re.M)  # name (type): meaning
    names = {n.strip("* ") for line in lines for n in line.split(",")}
    missing = set(inspect.signature(found).parameters) - names
    assert not missing, f"{name} does not describe {sorted(missing)}"


@pytest.mark.parametrize("optimizer", [ngplus.NGPlus, ngplus.NGAdam])
def test_the_page_of_the_method_has_the_pseudocode_of_the_docstring(optimizer: type) -> None:
    algorithm = re.search(r"\nAlgorithm:\n(.*?\n)\n\S", inspect.getdoc(optimizer) or "", re.S)
    assert algorithm is not None
    assert textwrap.dedent(algorithm[1]) in (ROOT / "docs" / "method.md").read_text()


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    shown = {
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    there = {id(OBJECTS[name]) for name in shown & set(OBJECTS)}  # some have two names
    missing = sorted(name for name, found in OBJECTS.items() if id(found) not in there)
    assert not missing, f"docs/api shows nothing of {missing}"


def blocks(page: Path) -> list[tuple[str, int, str, str]]:
    """Kind, line, mark and text of each fenced block of a page."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        body = "\n".join(line[indent:] for line in match["body"].splitlines())
        found.append((match["kind"], text.count("\n", 0, match.start("body")) + 1, match["mark"] or "", body))
    return found


def reader() -> dict[str, Any]:
    """What a reader of a page has before the first block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    loader = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(2)]
    x, y = loader[0]
    return {
        "__name__": "__page__", "ngplus": ngplus, "torch": torch, "nn": nn, "model": model, "loader": loader, "x": x,
        "y": y, "loss_fn": nn.CrossEntropyLoss(),
    }  # fmt: skip


PYTHON_PAGES = [page for page in PAGES if any(kind == "python" for kind, *_ in blocks(page))]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names, said = reader(), ""
    for kind, line, mark, body in blocks(page):
        if kind == "python" and not mark.startswith("not run"):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                exec(compile("\n" * line + body, str(page), "exec"), names)
            said = printed.getvalue()
        elif mark == "output" and "NGPLUS_WRITE_OUTPUT" in os.environ:
            page.write_text(page.read_text().replace(body, said.rstrip()))
        elif mark == "output":
            assert said.strip() == body.strip(), (
                f"{page.name}, line {line}: the page shows something else; NGPLUS_WRITE_OUTPUT=1 writes what it is now"
            )


def table(text: str, corner: str) -> dict[str, dict[str, str]]:
    """The first Markdown table whose upper left cell begins so: rows by their first cell, values by heading."""
    lines = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    start = next(i for i, cells in enumerate(lines) if cells[0].startswith(corner))
    found: dict[str, dict[str, str]] = {}
    for cells in lines[start + 2 :]:
        if len(cells) != len(lines[start]):
            break
        found[cells[0]] = dict(zip(lines[start][1:], cells[1:], strict=True))
    return found


def test_the_page_of_costs_has_the_other_optimizers() -> None:
    """A training step by SGD's and the state by the gradients, of each method, as rounded."""
    measured: dict[tuple[str, str], float] = {}
    for row in json.loads((ROOT / "docs/performance/bench.json").read_text())["rows"]:
        if row["row"] == "rivals" and (found := re.match(r"(.*): training step .*?: ([\w-]+)", row["what"])):
            name = found[1].replace('NG+ "inverse"', "NGPlus")  # its name in this file
            state = re.search(r"state ([\d.]+) of the gradient", row["note"])
            assert state is not None
            measured[name, found[2]] = round(row["measured"], 3)
            measured[name, f"state {found[2]}"] = float(state[1])
    names = {"NG+": "NGPlus"}
    rows = table((ROOT / "docs/performance.md").read_text(), "training step")
    assert rows
    for label, row in rows.items():
        model = next((m for m in ("ResNet-50", "6-layer", "MLP") if m in label), "ResNet-50")
        for name, cell in row.items():
            value = measured[names.get(name, name), f"state {model}" if "state" in label else model]
            digits = len(cell.partition(".")[2])
            near = abs(float(cell) - value) <= 0.5001 * 10**-digits
            assert near, f"{label}, {name}: {cell}, {value} in docs/performance/bench.json"


def test_the_readme_has_the_costs_of_the_page_of_costs() -> None:
    rows = table((ROOT / "docs/performance.md").read_text(), "model")
    resnet, transformer, mlp = (row["$T = 5$ (default)"] for row in rows.values())
    said = f"takes {resnet} of AdamW's time on ResNet-50, {transformer} on a Transformer and {mlp} on a wide MLP"
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_the_page_of_costs_has_the_numbers_of_the_measurements() -> None:
    """Each row of its second table is one of the benchmark's, and bold where it misses what was asked."""
    measured = []
    for file in ("rebuilt.json", "bench.json"):  # the later one comes first
        known = {group for group, *_ in measured}
        for row in json.loads((ROOT / "docs/performance" / file).read_text())["rows"]:
            if row["row"] not in known:
                value, form = row["measured"], "{:.0f} MB" if row["unit"] == "MB" else "{:.3f}"
                limits = "–".join(f"{limit:.3f}" for limit in row["quartiles"])
                value = form.format(value) if row["reached"] is not False else f"**{form.format(value)}**"
                asked = "" if row["asked"] is None else form.format(row["asked"])
                measured.append((row["row"], asked, value, limits))
    lines = (ROOT / "docs/performance.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| row | what | asked"))
    checked = 0
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]):
        group, _, asked, value, limits = (cell.strip(" `") for cell in line.strip("|").split("|"))
        assert any((group, asked, value) == row[:3] and limits in ("", row[3]) for row in measured), line
        checked += 1
    assert checked > 15


def test_pages_link_to_what_is_there() -> None:
    """The files and folders that pages name in links; mkdocs checks those inside docs/ again, with their anchors."""
    missing = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text):
            target = target[0] or target[1]
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing, missing
