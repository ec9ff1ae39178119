"""The report: complete, self-contained, and safe whatever the runs are called."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
pytest.importorskip("typer")

from made_up_runs import HOSTILE, diverged, run, save
from typer.testing import CliRunner

from ngplus.lab import collection
from ngplus.lab.cli import app
from ngplus.lab.report.curves import groups
from ngplus.lab.report.page import render
from ngplus.lab.report.pictures import draw
from ngplus.lab.runs import summarise


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def own(page: str) -> str:
    """A page without Plotly's code, and without the data to download."""
    page = re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", page, flags=re.S)
    return re.sub(r'<script type="application/json" id="runs">.*?</script>', "", page, flags=re.S)


def held(page: str, name: str) -> Any:
    """The data of a page."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, flags=re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_shows_curves_tables_settings_and_tuning() -> None:
    runs = [run("ngadam", s, 0.2) for s in range(3)] + [run("sgd", s, 0.05) for s in range(3)]
    runs = [replace(made, environment={"ngplus": "1.2.3", "command": ["/home/me/ngplus"]}) for made in runs]
    page = render(groups(runs), "Title", date(2026, 1, 31))
    seen = Elements(own(page))
    assert seen.tags.count("figure") == 6  # three metrics, over steps and over time
    assert "<title>Title: digits, 2026-01-31, ngplus 1.2.3</title>" in page
    for words in ("Validation accuracy over steps", "Training loss over seconds", "lr 0.01", "1 trial.", "12.3 kB"):
        assert words in seen.text
    assert seen.text.index("ngadam") < seen.text.index("sgd")  # the faster one first
    assert not {"link", "img", "iframe"} & set(seen.tags)
    assert not re.search(r"https?://", own(page))  # nothing from the network
    assert "/home/me" not in page
    chart = held(page, "charts")[0][0]
    assert [curve["optimizer"] for curve in chart["curves"]] == ["ngadam", "sgd"]
    assert [len(curve["seeds"]) for curve in chart["curves"]] == [3, 3]
    assert chart["curves"][0]["mean"][1] == pytest.approx(1 - math.exp(-0.2 * 5) - 0.01, abs=1e-5)
    assert len(held(page, "runs")["runs"]) == 6


def test_the_data_of_the_page_are_a_collection(tmp_path: Path) -> None:
    runs = [run("ngadam", s) for s in range(2)]
    (tmp_path / "runs.json").write_text(json.dumps(held(render(groups(runs), "t"), "runs")))
    assert [found.metrics for found in collection.find([tmp_path / "runs.json"])] == [made.metrics for made in runs]


def test_many_workloads_are_counted_in_the_title() -> None:
    for names, told in ((["b", "a"], "t: b, a,"), (list("abcd"), "t: 4 workloads,")):
        page = render(groups([run(workload=name) for name in names]), "t")
        assert f"<title>{told} " in page


def test_the_policy_has_the_digests_of_the_two_scripts() -> None:
    page = render(groups([run()]), "t")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 2
    assert "script-src " + " ".join(f"'sha256-{digest}'" for digest in digests) + ";" in page
    assert len(page) < 5_500_000


def test_a_run_that_diverged_covers_nothing() -> None:
    """It is in no mean, no band and no range, and ends at the edge of the chart."""
    whole = [run("sgd", s, 0.05) for s in range(2)]
    alone, beside = groups(whole)[0], groups([*whole, diverged("sgd", 2), diverged("adam")])[0]
    for before, after in zip(alone.charts, beside.charts, strict=True):
        assert (after.bottom, after.top, after.logarithmic) == (before.bottom, before.top, before.logarithmic)
        sgd, adam = after.curves
        assert (sgd.mean, sgd.low, sgd.high) == tuple(getattr(before.curves[0], n) for n in ("mean", "low", "high"))
        assert adam.mean == ()
        lost = adam.seeds[0]
        assert lost.diverged
        assert all(after.bottom <= y <= after.top for y in lost.y[:-1] if "accuracy" not in after.title)
        if "loss" in after.title:
            assert lost.end is not None
            assert lost.y[-1] > after.top == lost.end[1]
            assert lost.x[-2] < lost.end[0] < lost.x[-1]
    assert all(draw(beside, brief=brief).startswith(b"\x89PNG") for brief in (True, False))


def test_runs_that_all_diverged_are_drawn() -> None:
    (section,) = groups([diverged("sgd", s, after=s) for s in range(2)])
    for chart in section.charts:
        assert chart.curves[0].mean == ()
        if not chart.logarithmic:
            assert chart.top < 10
    assert "2 diverged" in render([section], "t")


def test_hostile_names_are_text() -> None:
    made = run(
        HOSTILE,
        hyper={HOSTILE: HOSTILE},
        workload=HOSTILE,
        preset=HOSTILE,
        measure=HOSTILE,
        schedule=HOSTILE,
        tuning={HOSTILE: HOSTILE, "trials": [HOSTILE, {"hyper": {HOSTILE: HOSTILE}, "score": HOSTILE}]},
    )
    made = replace(made, environment={HOSTILE: [HOSTILE], "ngplus": HOSTILE})
    page = render(groups([made]), HOSTILE)
    seen = Elements(page)
    assert seen.tags.count("script") == 4  # Plotly, the script of the page, and two with data
    assert "img" not in seen.tags
    assert not {"onerror", "src", "href"} & seen.attributes
    assert HOSTILE in seen.text
    assert "default-src 'none'" in page


def test_the_command_writes_a_page_pictures_and_a_collection(tmp_path: Path) -> None:
    for seed in range(2):
        save(tmp_path / "runs", run("ngadam", seed))
        save(tmp_path / "runs", run(HOSTILE, seed))
    save(tmp_path / "runs", run("adam", workload="other"))
    out, held = tmp_path / "page" / "r.html", tmp_path / "all.json"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(out), "--json", str(held)])
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in out.parent.iterdir()) == [
        "r-1-dark.png",
        "r-1.png",
        "r-2-dark.png",
        "r-2.png",
        "r.html",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in out.parent.glob("*.png"))
    again = tmp_path / "again.html"
    result = CliRunner().invoke(app, ["report", str(held), "--out", str(again), "--no-png"])
    assert result.exit_code == 0, result.output
    assert again.read_text() == out.read_text()  # a collection is as good as the folders
    assert not (tmp_path / "again.png").exists()


def test_runs_that_are_left_out_are_named(tmp_path: Path) -> None:
    """Of a sweep of learning rates one run is shown; the same run under two names is not worth a word."""
    save(tmp_path / "runs", run("ngadam", 0, 0.2))
    save(tmp_path / "runs", run("ngadam", 0, 0.1, hyper={"lr": 0.02}))
    arguments = ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html"), "--no-png"]
    said = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "all.json")]).output
    assert "1 run in" in said
    assert "Left out 1 run" in said
    assert "runs/run1" in said
    assert "run0" not in said
    said = CliRunner().invoke(app, ["report", str(tmp_path / "all.json"), *arguments[1:]]).output
    assert said.count("run1") == 1
    assert "1 run." in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("values", [[], [None], ["text"], [0.0], [5.0, 5.0], [-1e300, 1e300], [1e-300, 1.0], [True]])
def test_any_metrics_can_be_drawn(values: list[Any]) -> None:
    made = run()
    metrics = [
        {"step": k, "seconds": float(k), "loss": v, "accuracy": v, "train_loss": v} for k, v in enumerate(values)
    ]
    made = replace(made, metrics=metrics, result=summarise(made.config, metrics, 1, 0.0, 0, "diverged"))
    page = render(groups([made, run("sgd")]), "t")
    assert "nan" not in Elements(own(page)).text.lower().replace("ngadam", "")
    assert len(held(page, "charts")[0]) == 6
    for brief in (True, False):
        assert draw(groups([made])[0], brief=brief).startswith(b"\x89PNG")
