"""The summary and the captions of the report: who wins, and under which conditions the runs were made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
pytest.importorskip("typer")

from made_up_runs import run, save
from typer.testing import CliRunner

from ngplus.lab import collection
from ngplus.lab.amounts import amount
from ngplus.lab.cli import app
from ngplus.lab.report.curves import groups
from ngplus.lab.report.page import render
from ngplus.lab.report.results import markdown
from ngplus.lab.report.summary import caption, table
from ngplus.lab.runs import summarise


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
    assert "Time was not measured" in text
    assert "ms a step" not in text
    assert not (tmp_path / "report.html").exists()
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    pictures = [f"{workload}-small{end}.png" for workload in rates for end in ("", "-dark")]
    assert names == sorted([*pictures, "steps"])
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


def test_the_summary_compares_ngplus_with_sgd_and_kfac(tmp_path: Path) -> None:
    rates = {  # a rate of 0.01 misses the target
        "both": {"ngplus": 0.2, "sgd": 0.1, "kfac": 0.12},
        "late": {"ngplus": 0.1, "sgd": 0.01, "kfac": 0.12},
        "lost": {"ngplus": 0.2, "sgd": 0.01, "kfac": 0.01},
    }
    for workload, found in rates.items():
        for optimizer, rate in found.items():
            for seed in range(2):
                made = run(optimizer, seed, rate, workload=workload)
                if (workload, optimizer, seed) == ("lost", "ngplus", 1):
                    assert made.result is not None
                    made = replace(made, result=replace(made.result, collapsed=True))
                save(tmp_path / workload, made)
    page = tmp_path / "results.md"
    result = CliRunner().invoke(app, ["report", *(str(tmp_path / name) for name in rates), "--summary", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "On 2 of 3 workloads it gets to the target" in text
    assert "of NGPlus, 1 run did (lost)." in text
    assert "NGPlus takes 0.60 of SGD's steps in the geometric mean" in text
    assert "| late | 25 | not reached | 22 | – | 1.11 | no |" in text
    assert "| lost | 15 (1 of 2) | not reached | not reached | – | – | yes |" in text


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
    assert "\n1 run on" in page.read_text()
    assert len(collection.read(tmp_path / "results" / "timed.json")) == 1


def test_timed_runs_without_a_summary_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "runs", run())
    result = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--timed", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert "--timed can only be used with --summary" in result.output


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
        ({**study, "trials": [{}]}, "1 trial (adam)"),
        ({**study, "steps": 60}, "6 trials of 60 steps (adam)"),
        ({**study, "target": 0.8}, "6 trials to 0.8 (adam)"),
        ({"recipe": "as published"}, "as published (adam)"),
        (None, "none (adam)"),
    ):
        said = caption([*same, run("adam", tuning=tuning)])
        assert f"tuning 6 trials (ngadam, sgd), {told}. " in said
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


def test_what_was_measured_at_the_end_has_a_column() -> None:
    made = run()
    assert made.result is not None
    made = replace(made, result=replace(made.result, scores={"bleu": 12.25}))
    headings, lines = table([made])
    assert lines[0][headings.index("bleu")] == "12.25"
    assert "bleu" in render(groups([made]), "t")


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
