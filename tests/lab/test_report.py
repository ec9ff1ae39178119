"""The report: complete, self-contained, and safe whatever the runs are called; looked at in a real Chromium."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from helpers.project import dom_in_chromium, needs_chromium

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from made_up_runs import run, save
from typer.testing import CliRunner

from ngplus.lab.cli import app
from ngplus.lab.report import svg
from ngplus.lab.report.curves import groups
from ngplus.lab.report.page import render
from ngplus.lab.runs import summarise

HOSTILE = '"><script>document.title="hacked"</script><img src=x onerror=alert(1)>$\\frac{&#x27;\x1b[31m\u202e'


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


def test_the_page_shows_curves_tables_settings_and_tuning() -> None:
    page = render(groups([run("ngadam", s, 0.2) for s in range(3)] + [run("sgd", s, 0.05) for s in range(3)]), "Title")
    seen = Elements(page)
    assert seen.tags.count("figure") == 6  # three metrics, over steps and over time
    assert page.count('class="band"') >= 6
    for words in ("Validation accuracy over steps", "Training loss over seconds", "lr 0.01", "1 trial.", "12.3 kB"):
        assert words in seen.text
    assert seen.text.index("ngadam") < seen.text.index("sgd")  # the faster one first
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert not re.search(r"https?://", page)  # nothing from the network


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
    made = replace(made, environment={HOSTILE: [HOSTILE]})
    page = render(groups([made]), HOSTILE)
    seen = Elements(page)
    assert not {"script", "img"} & set(seen.tags)
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
    assert "1 run left out" in said
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
    assert "nan" not in page.lower().replace("ngadam", "")
    for section in groups([made]):
        for chart in section.charts:
            assert "inf" not in svg.draw(chart)


# ------------------------------------------------------------------------------------------------ Chromium

# A page around the page: it measures what the browser has made of it at a width, and writes it into its own body.
PROBE = """<!DOCTYPE html><body><pre id="found"></pre><iframe id="frame" style="width:{width}px;height:900px;border:0"
src="{page}"></iframe><script>
document.getElementById("frame").onload = () => {{
  const inside = document.getElementById("frame").contentDocument, root = inside.documentElement;
  const figures = [...inside.querySelectorAll("figure")].map(f => f.getBoundingClientRect());
  document.getElementById("found").textContent = JSON.stringify({{
    title: inside.title, overflow: root.scrollWidth - root.clientWidth, figures: figures.length,
    columns: new Set(figures.map(f => Math.round(f.left))).size,
    narrowest: Math.min(...figures.map(f => f.width)), back: getComputedStyle(inside.body).backgroundColor,
    lines: [...inside.querySelectorAll("figure path.line")].every(p => p.getTotalLength() > 10),
    hidden: (inside.querySelector("#s0o0").click(),
      getComputedStyle(inside.querySelector(".charts .o0")).display)}});
}};</script>"""


@needs_chromium
@pytest.mark.parametrize(("width", "columns", "scheme"), [(360, 1, "dark"), (1400, 2, "light")])
def test_in_chromium(width: int, columns: int, scheme: str, tmp_path: Path) -> None:
    made = [run("ngadam", s) for s in range(2)] + [
        run(name * 3 if name == HOSTILE else name) for name in ("sgd", HOSTILE)
    ]
    page, probe = tmp_path / "report.html", tmp_path / "probe.html"
    # The policy of the page holds for the frame as well; only the probe's own script runs.
    page.write_text(render(groups(made), "The title"))
    probe.write_text(PROBE.format(width=width, page="report.html"))
    dom = dom_in_chromium(probe, width + 40, scheme == "dark", 5000)
    found = json.loads(Elements(dom).text.split("</pre>")[0].strip().split("\n")[0].partition("document")[0])
    assert found["title"] == "The title"  # no name has changed it
    assert found["overflow"] <= 0  # nothing sticks out at the side
    assert found["figures"] == 6
    assert found["columns"] == columns
    assert found["narrowest"] > 300
    assert found["lines"]
    assert found["hidden"] == "none"  # the check box hides the curve, without any script in the page
    assert (found["back"] == "rgb(255, 255, 255)") == (scheme == "light")
