"""The report: complete, self-contained, and safe whatever the runs are called; looked at in a real Chromium."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from typer.testing import CliRunner

from ngplus.lab import collection, runs
from ngplus.lab.amounts import amount
from ngplus.lab.cli import app
from ngplus.lab.report import svg
from ngplus.lab.report.curves import groups
from ngplus.lab.report.page import render
from ngplus.lab.report.results import markdown
from ngplus.lab.report.summary import caption, table
from ngplus.lab.runs import Config, Run, RunError, summarise

HOSTILE = '"><script>document.title="hacked"</script><img src=x onerror=alert(1)>$\\frac{&#x27;\x1b[31m\u202e'


def run(optimizer: str = "ngadam", seed: int = 0, rate: float = 0.1, **changes: Any) -> Run:
    """A made-up run whose loss falls as exp(-rate * step)."""
    config = Config(
        workload="digits",
        preset="small",
        optimizer=optimizer,
        hyper={"lr": 0.01},
        seed=seed,
        steps=50,
        batch_size=8,
        evaluate_every=5,
        target=0.9,
        measure="accuracy",
        higher_is_better=True,
        tuning={"study": "s", "trials": [{"hyper": {"lr": 0.01}, "score": 0.5}]},
    )
    config = replace(config, **changes)
    metrics: runs.Metrics = []
    for step in range(51):
        row: dict[str, Any] = {
            "step": step,
            "seconds": 0.02 * step,
            "train_loss": math.exp(-rate * step) + 0.001 * seed,
        }
        if step % 5 == 0:
            row |= {"loss": 2 * math.exp(-rate * step), config.measure: 1 - math.exp(-rate * step) - 0.01 * seed}
        metrics.append(row)
    result = summarise(config, metrics, 50, 1.0, 12345, "finished")
    return Run(Path(f"{optimizer}-{seed}"), config, {"torch": "2"}, metrics, result)


def save(folder: Path, made: Run) -> None:
    place = folder / f"run{len(list(folder.glob('run*')))}"
    place.mkdir(parents=True)
    runs.write_json(place / "config.json", made.config.as_dict())
    runs.write_json(place / "environment.json", made.environment)
    assert made.result is not None
    runs.write_json(place / "result.json", vars(made.result))
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.metrics))


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


def test_the_summary_says_where_ngadam_wins_ties_and_loses(tmp_path: Path) -> None:
    rates = {  # the accuracy is 1 - exp(-rate * step): the target of 0.9 is there after 2.3 / rate steps
        "won": {"ngadam": 0.2, "adam": 0.1, "soap": 0.12},
        "tied": {"ngadam": 0.2, "adam": 0.2},
        "lost": {"ngadam": 0.1, "ngplus": 0.3, "adam": 0.2},
        "never": {"ngadam": 0.01, "adam": 0.01},
    }
    for workload, held in rates.items():
        for optimizer, rate in held.items():
            for seed in range(2):
                save(tmp_path / workload, run(optimizer, seed, rate, workload=workload))
    page = tmp_path / "results.md"
    result = CliRunner().invoke(app, ["report", *(str(tmp_path / name) for name in rates), "--summary", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "NGAdam wins on won. NGAdam ties on tied. NGAdam loses on lost. Neither gets there on never." in text
    assert "| won | 15 | soap, 22 | 0.67 | wins |" in text
    assert "in the geometric mean" in text
    assert "| never | not reached | adam, not reached | – | neither gets there |" in text
    assert "| ngplus |  |  | 10 |  |" in text
    assert "Not measured yet" in text
    assert "ms a step" not in text
    assert not (tmp_path / "report.html").exists()
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert names == ["lost-small.png", "never-small.png", "steps", "tied-small.png", "won-small.png"]
    # from what is kept the page can be made again; new runs come before old ones, and timed ones beside them
    kept = [str(path) for path in sorted((tmp_path / "results" / "steps").iterdir())]
    order = [str(path) for path in (tmp_path / "results" / "steps" / f"{w}-small.json" for w in rates)]
    assert sorted(order) == kept
    result = CliRunner().invoke(app, ["report", *order, "--summary", str(page)])
    assert result.exit_code == 0, result.output
    assert page.read_text() == text
    for seed in range(2):
        save(tmp_path / "new", run("ngadam", seed, 0.6, workload="lost"))
    arguments = ["report", str(tmp_path / "new"), *order, "--timed", str(tmp_path / "new"), "--timed", order[0]]
    result = CliRunner().invoke(app, [*arguments, "--summary", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "NGAdam wins on lost, won. NGAdam ties on tied. NGAdam loses on none." in text
    assert "NGAdam wins on won. NGAdam ties on none. NGAdam loses on none." in text
    assert "ms a step" in text
    assert (tmp_path / "results" / "timed.json").exists()


def test_the_summary_leaves_out_runs_that_have_not_ended(tmp_path: Path) -> None:
    for seed in range(2):
        made = run("ngadam", seed, 0.2)
        assert made.result is not None
        ended = "finished" if seed == 0 else "interrupted"
        save(tmp_path / "runs", replace(made, result=replace(made.result, status=ended)))
    page = tmp_path / "results.md"
    both = ["report", str(tmp_path / "runs"), "--timed", str(tmp_path / "runs"), "--summary", str(page)]
    result = CliRunner().invoke(app, both)
    assert result.exit_code == 0, result.output
    assert "Left out of the summary: 2 runs that have not ended" in result.output
    assert page.read_text().count("of 1 seed;") == 2
    assert len(collection.read(tmp_path / "results" / "timed.json")) == 1


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


def test_timed_runs_without_a_summary_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "runs", run())
    result = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--timed", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert "--timed goes with --summary" in result.output


def test_the_summary_keeps_sizes_apart_and_says_what_it_is_made_of() -> None:
    large = {"preset": "paper", "steps": 60}
    made = [run("ngadam", rate=0.2), run("ngadam", rate=0.1, **large)]
    made = [replace(one, environment={"torch": "2", "threads": 1}) for one in made]
    page = markdown(groups(made), [], {}, "")
    assert "| ngadam | 15 | 25 |" in page
    assert "| *budget* | 50 | 60 |" in page
    assert ", one thread each, torch 2. Every optimizer was tuned with 1 trial." in page
    recipe = replace(run("kfac", tuning={"recipe": "as published"}), environment={"threads": 2})
    page = markdown(groups([*made, recipe]), [], {}, "")
    assert ", 1 or 2 threads each, " in page
    assert "tuned with 1 trial; with a published recipe: kfac on digits." in page
    trials = [{"hyper": {"lr": 0.1}, "score": 0.3, "scores of the finals": [0.3, 0.5]}, {"hyper": {}, "score": 1.0}]
    found = run("ngadam", tuning={"trials": trials, "finalists": 2, "seeds of the finals": [100, 101]})
    assert "tuned with 2 trials, the best 2 of them on up to 2 seeds." in markdown(groups([found]), [], {}, "")
    assert "lr 0.1 → 0.3 (0.3, 0.5)" in render(groups([found]), "")


def test_what_differs_between_runs_is_in_the_caption() -> None:
    same, other = [run("ngadam", 0), run("sgd", 0)], run("adam", 0, steps=60, target=0.8, schedule="linear")
    assert "Not the same" not in caption(same)
    assert "50 steps of batch 8, cosine schedule" in caption(same)
    said = caption([*same, other])
    assert "50 or 60 steps of batch 8, cosine or linear schedule" in said
    assert "steps 50 (ngadam, sgd), 60 (adam); target 0.9 (ngadam, sgd), 0.8 (adam); schedule" in said
    assert all(chart.target is None for chart in groups([*same, other])[0].charts)
    assert "Not made under the same conditions" in markdown(groups([*same, other]), [], {}, "")


def test_other_tuning_and_other_machines_are_in_the_caption() -> None:
    study = {"trials": [{}] * 6, "steps": 50, "target": 0.9}
    same = [run("ngadam", 0, tuning=study), run("sgd", 0, tuning={**study, "study": "other"})]
    same = [replace(one, environment={"threads": 1, "processor": "A", "device": "cpu"}) for one in same]
    assert "Not the same" not in caption(same)
    assert "Not the same" not in caption([*same, replace(run("adam", tuning=study), environment={})])  # not known
    for tuning, told in (
        ({**study, "trials": [{}]}, "1 trial of 50 steps to 0.9 (adam)"),
        ({**study, "steps": 60}, "6 trials of 60 steps to 0.9 (adam)"),
        ({**study, "target": 0.8}, "6 trials of 50 steps to 0.8 (adam)"),
        ({"recipe": "as published"}, "as published (adam)"),
        (None, "none (adam)"),
    ):
        said = caption([*same, run("adam", tuning=tuning)])
        assert f"tuning 6 trials of 50 steps to 0.9 (ngadam, sgd), {told}. " in said
    for name, value in (("threads", 2), ("processor", "B"), ("device", "cuda")):
        other = replace(run("adam", tuning=study), environment={**same[0].environment, name: value})
        assert f"Not the same for all: {name} {same[0].environment[name]} (ngadam, sgd), {value} (adam). " in caption(
            [*same, other]
        )


def test_a_run_that_diverged_has_no_numbers_of_its_end() -> None:
    made = run("sgd", rate=0.001)
    made = replace(made, result=summarise(made.config, made.metrics[:1], 0, 0.0, 0, "diverged"))
    headings, lines = table([run("ngadam"), made])
    assert lines[1][0] == "sgd (1 diverged)"
    assert {lines[1][headings.index(name)] for name in ("at the end", "best", "ms a step", "state")} == {"–"}
    assert "Runs that diverged" in caption([made])


def test_a_thinned_run_has_its_looks_and_the_mean_training_loss() -> None:
    made = run()
    made = replace(
        made, metrics=[{k: v for k, v in row.items() if k != "train_loss" or row["step"]} for row in made.metrics]
    )
    made = replace(made, environment={"torch": "2", "command": ["ngplus", "/home/me"]})
    assert collection.thinned(made).environment == {"torch": "2"}
    kept = collection.thinned(made).metrics
    assert [row["step"] for row in kept] == list(range(0, 51, 5))
    assert "train_loss" not in kept[0]
    want = sum(math.exp(-0.1 * step) for step in range(6, 11)) / 5
    assert kept[2]["train_loss"] == pytest.approx(want, rel=1e-5)
    assert kept[2]["accuracy"] == pytest.approx(1 - math.exp(-1), rel=1e-5)


def test_what_was_measured_at_the_end_has_a_column() -> None:
    made = run()
    assert made.result is not None
    made = replace(made, result=replace(made.result, scores={"bleu": 12.25}))
    headings, lines = table([made])
    assert lines[0][headings.index("bleu")] == "12.25"
    assert "bleu" in render(groups([made]), "t")


@pytest.mark.parametrize("change", [{"runs": [7]}, {"tuning": []}, {"format": 9}])
def test_a_damaged_collection_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    collection.write(path, [run()])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match=re.escape(str(path))):
        collection.find([path])


@pytest.mark.parametrize(
    "metrics", [[], {"step": [0]}, {"step": [0], "seconds": [0, 1]}, {"step": ["x"], "seconds": [0]}]
)
def test_damaged_metrics_of_a_collection_are_named(metrics: Any, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    collection.write(path, [run()])
    held = json.loads(path.read_text())
    held["runs"][0]["metrics"] = metrics
    path.write_text(json.dumps(held))
    with pytest.raises(RunError, match=re.escape(str(path))):
        collection.find([path])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"format": 2}'),
        ("config.json", '{"format": 1}'),
        ("config.json", "[" * 100_000),
        ("result.json", '{"status": "finished"}'),
        ("result.json", "7"),
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", '{"step": "x", "seconds": 1}\n'),
        ("metrics.jsonl", "\x00\n"),
    ],
)
def test_damaged_files_are_named(name: str, content: str, tmp_path: Path) -> None:
    save(tmp_path, run())
    (tmp_path / "run0" / name).write_text(content)
    with pytest.raises(RunError, match=re.escape(name)):
        collection.find([tmp_path])


def test_a_configuration_of_wrong_types_is_refused(tmp_path: Path) -> None:
    for key, value in {"steps": "many", "hyper": 3, "optimizer": None, "higher_is_better": 1, "seed": True}.items():
        content = {**run().config.as_dict(), key: value}
        with pytest.raises(RunError, match=key):
            Config.from_dict(content, tmp_path)


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

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
]

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


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize(("width", "columns", "scheme"), [(360, 1, "dark"), (1400, 2, "light")])
def test_in_chromium(width: int, columns: int, scheme: str, tmp_path: Path) -> None:
    made = [run("ngadam", s) for s in range(2)] + [
        run(name * 3 if name == HOSTILE else name) for name in ("sgd", HOSTILE)
    ]
    page, probe = tmp_path / "report.html", tmp_path / "probe.html"
    # The policy of the page holds for the frame as well; only the probe's own script runs.
    page.write_text(render(groups(made), "The title"))
    probe.write_text(PROBE.format(width=width, page="report.html"))
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        "--allow-file-access-from-files",
        f"--window-size={width + 40},1200",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"file://{probe}",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = json.loads(Elements(dom).text.split("</pre>")[0].strip().split("\n")[0].partition("document")[0])
    assert found["title"] == "The title"  # no name has changed it
    assert found["overflow"] <= 0  # nothing sticks out at the side
    assert found["figures"] == 6
    assert found["columns"] == columns
    assert found["narrowest"] > 300
    assert found["lines"]
    assert found["hidden"] == "none"  # the check box hides the curve, without any script in the page
    assert (found["back"] == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (553_100, "553 kB"),
        (2.06e12, "2.06 TB"),
        (3e21, "3e+03 EB"),
    ],
)
def test_amounts_have_three_digits(number: float, text: str) -> None:
    assert amount(number, "B") == text
    assert amount(number) == text.removesuffix("B").strip()
