"""What is made of a sweep's runs: numbers with known answers, the page of results, the tables of the documentation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from commands import ngplus
from made_up_sweeps import line, lines_of, rows, save, timing

from helpers.project import ROOT
from ngplus.lab.sweep import numbers, page, tables
from ngplus.lab.sweep.rows import read

STANDARD = ROOT / "docs" / "results" / "standard.jsonl"
ADAMW = (4.0, 3.0, 2.5, 2.0)  # at 2.0 after all of its 400 steps


def test_steps_are_interpolated() -> None:
    curve = [(100, 3.0), (200, 2.0), (300, 1.0)]
    assert numbers.steps_to(curve, 1.5, False) == pytest.approx(250)
    assert numbers.steps_to(curve, 3.5, False) == 100
    assert numbers.steps_to(curve, 0.5, False) == math.inf
    assert numbers.steps_to([(10, 0.2), (20, 0.6)], 0.5, True) == pytest.approx(17.5)
    assert numbers.steps_to([(10, 3.0), (20, math.nan)], 2.0, False) == math.inf


def test_a_level_counts_for_runs_that_keep_it() -> None:
    def share(*curves: tuple[float | None, ...]) -> float:
        return numbers.share_of_budget(rows(line(seed=k, curve=curve) for k, curve in enumerate(curves)), 2.0)

    assert share((4.0, 3.0, 1.0, 1.0)) == pytest.approx(250 / 400)
    assert share((4.0, 3.0, 1.0, 2.15)) == pytest.approx(250 / 400)  # less than a tenth of the way from 4 to 2 behind
    assert share((4.0, 3.0, 1.0, 2.25)) == math.inf
    assert share((4.0, 3.0, 1.0, 1.0), (4.0, 3.0, None)) == math.inf
    assert share((4.0, 3.0, 1.0, 1.0), (4.0, 4.0, 2.0, 2.0)) == pytest.approx(275 / 400)  # the mean curve: 4, 3.5, 1.5


@pytest.mark.parametrize(
    ("ours", "theirs", "spread", "word"),
    [
        (0.5, 0.6, 0.0, "wins"),
        (0.6, 0.5, 0.0, "loses"),
        (0.58, 0.6, 0.0, "ties"),  # 5 %
        (0.5, 0.6, 0.11, "ties"),  # a seed's spread
        (0.5, math.inf, 9.0, "wins"),
        (math.inf, 0.5, 9.0, "loses"),
        (math.inf, math.inf, 0.0, "neither gets there"),
    ],
)
def test_wins_and_ties(ours: float, theirs: float, spread: float, word: str) -> None:
    assert numbers.verdict(ours, theirs, spread) == word


def test_the_width_of_the_learning_rates() -> None:
    def width(errors: dict[float, float | None]) -> numbers.Width | None:
        made = [line(seed=100, curve=(9.0, value), hyper={"lr": rate}) for rate, value in errors.items()]
        return numbers.width(rows(made), "task", "adamw")

    # 2.04 is half of the way from 2.0 to 2.08, and all of the way from 2.01 to 2.04
    found = width({0.01: 2.08, 0.02: 2.0, 0.04: 2.01, 0.08: 2.04, 0.16: 2.5})
    assert found is not None
    assert found.low == pytest.approx(0.01 * math.sqrt(2))
    assert found.high == pytest.approx(0.08, rel=1e-6)
    assert not found.open
    lost = width({0.01: 3.0, 0.02: 2.0, 0.04: None})  # nothing is known between a rate and one that diverges
    assert lost is not None
    assert (lost.high, lost.open) == (0.02, False)
    flat = width({0.01: 2.0, 0.02: 2.0, 0.04: 2.0})
    assert flat is not None
    assert (flat.factor, flat.open) == (4.0, True)
    assert width({0.01: 2.0, 0.02: 2.0}) is None


def test_runs_with_other_settings_than_the_best_trial_are_left_out() -> None:
    made = [line(seed=100, curve=(3.0, value), hyper={"lr": rate}) for rate, value in ((0.1, 1.0), (0.2, None))]
    made += [line(seed=seed, curve=(3.0, 1.0), hyper={"lr": rate}) for seed, rate in ((0, 0.1), (1, 0.1), (1, 0.2))]
    made.append(line(seed=100, curve=(3.0, 0.5), hyper={"lr": 0.4}, kind="rate"))  # not a trial
    assert [row.hyper["lr"] for row in numbers.compared(rows(made), "task", "adamw")] == [0.1, 0.1]
    assert numbers.best_trial(rows(made[1:2])) is None


def page_of(tmp_path: Path, lines: list[dict[str, object]]) -> str:
    file = save(tmp_path / "sweep.jsonl", lines)
    ngplus("sweep", "--out", str(file), "--summary", str(tmp_path / "results.md"))
    return (tmp_path / "results.md").read_text()


def test_the_page_says_where_ngadam_wins_ties_and_loses(tmp_path: Path) -> None:
    curves = {
        "won": {"ngadam": (4.0, 2.0, 1.5, 1.0), "soap": (4.0, 3.0, 2.0, 1.5)},  # 200 and 300 of 400 steps
        "tied": {"ngadam": (4.0, 2.0, 1.5, 1.0), "soap": (4.0, 2.05, 1.5, 0.5)},  # 200 and 209
        "lost": {"ngadam": (4.0, 3.0, 2.0, 1.9), "soap": (4.0, 2.0, 1.9, 1.7)},
        "diverged": {"ngadam": (4.0, 2.0, None), "soap": (4.0, 2.0, 1.9, 1.7)},
    }
    made, times = [], []
    for task, held in curves.items():
        for name, curve in {"adamw": ADAMW, **held}.items():
            made += lines_of(name, [curve, curve], workload=task)
            times.append(timing(name, [20.0, 30.0, 20.0] if name == "ngadam" else [10.0, 15.0, 10.0], timed=task))
    text = page_of(tmp_path, made)
    assert "NGAdam wins on won; it ties on tied; it loses on lost and diverged." in text
    assert "| won | 0.500 | 1.000 | SOAP, 0.750 | 0.67 | wins |" in text
    assert "| tied | 0.500 | 1.000 | SOAP, 0.523 | 0.96 | ties |" in text
    assert "| diverged | not reached | 1.000 | SOAP, 0.500 | – | loses |" in text
    assert "On 1 of 4 tasks its final measure is the best or within a seed's spread of the best; not on tied," in text
    assert "2 of 2 diverged" in text
    assert "over the 3 tasks where both get there" in text
    assert "Time was not measured" in text
    assert "earlier rules" not in text
    assert "    | NGAdam | 0.500 ± 0 | 0.500 ± 0 | 0.750 ± 0 | not reached | – |" in text
    assert "    | SOAP | lr 0.01 | lr 0.01 | lr 0.01 | lr 0.01 |" in text
    names = {f"{task}{end}.png" for task in curves for end in ("", "-dark")}
    assert {path.name for path in (tmp_path / "results").iterdir()} == names
    text = page_of(tmp_path, [*made, *times])
    assert "Time to AdamW's final measure, as parts of AdamW's budget: NGAdam loses on won, tied, lost and" in text
    assert "| won | 1.000 | 1.000 | SOAP, 0.750 | 1.33 | loses |" in text  # half of the steps, each of twice the time
    assert "    | NGAdam | 2.00 (2.00 to 2.00) |" in text


def test_the_answer_has_the_geometric_means(tmp_path: Path) -> None:
    made = []
    for task, ours, other in (("a", (4.0, 2.0, 1.5, 1.0), 1.5), ("b", (2.0, 1.5, 1.2, 1.0), 1.5)):  # 0.5 and 0.25
        made += lines_of("adamw", [ADAMW, ADAMW], workload=task)
        made += lines_of("ngadam", [ours], workload=task, state_bytes=500)
        made += lines_of("soap", [(4.0, 3.0, 2.0, other)], workload=task)
    made += [timing(name, [10.0, 10.0], timed=task) for task in "ab" for name in ("adamw", "ngadam", "soap")]
    text = page_of(tmp_path, made)
    answer = "**NGAdam reaches the final quality of a tuned AdamW in 0.35 of AdamW's steps and 0.35 of its time**"
    assert answer in text
    assert "it takes 0.47 in the geometric mean and 0.67 at worst (a)." in text  # sqrt(2/3 * 1/3)
    assert "    | NGAdam | 500 B | 500 B |\n" in text
    assert "On 2 of 2 tasks its final measure is the best or within a seed's spread of the best." in text
    others = [{**one, "hyper": {"lr": 0.5}} if "timed" in one else one for one in made]
    assert "Time was not measured" in page_of(tmp_path, others)  # of settings that are no longer the best


def test_a_second_picture_has_time(tmp_path: Path) -> None:
    file = save(tmp_path / "sweep.jsonl", [*lines_of("adamw", [ADAMW]), *lines_of("ngadam", [ADAMW])])
    ngplus("sweep", "task", "--out", str(file), "--picture", str(tmp_path / "p.png"))
    assert {"p.png", "p-dark.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "no runs of the preset standard of qm9" in ngplus("sweep", "qm9", "--out", str(file), "--show", code=2)
    assert "There is no file" in ngplus("sweep", "--out", str(tmp_path / "none"), "--show", code=2)


def test_a_part_of_the_runs_makes_a_page(tmp_path: Path) -> None:
    assert "no task with runs of both yet" in page_of(tmp_path, [line(seed=100, curve=ADAMW)])
    assert "no task with runs of both yet" in page_of(tmp_path, lines_of("adamw", [ADAMW]))


# ------------------------------------------------------------------------------------------------ the documentation


def test_tables_compare_with_the_baseline() -> None:
    made = lines_of("adamw", [(3.0, 2.0)] * 3) + lines_of("muon", [(3.0, 1.0), (3.0, 0.9), (3.0, 1.1)])
    text = "\n".join(tables.tables(rows(made)))
    assert "| muon | 1 ± 0.1 (lr 0.01) | 0.500 |" in text  # half of the baseline's loss
    assert "| adamw | 1.000 | 1.000 |" in text
    assert "| muon | 0.750 | 0.750 |" in text  # from 3 to 1 in the second half: at 2 after 150 of 200 steps
    assert "| adamw | not reached | inf |" in text


def test_results_md_is_the_page_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    place, source = Path("docs/results.md"), STANDARD.relative_to(ROOT)
    made, timings = read(source)
    assert page.markdown(numbers.of_today(made), timings, place, source) == place.read_text()


def test_the_readme_has_the_steps_of_the_runs() -> None:
    lines = tables.tables(numbers.of_today(read(STANDARD)[0]))
    start = next(i for i, one in enumerate(lines) if one.startswith("Steps to the baseline's"))
    shown = (ROOT / "README.md").read_text().splitlines()
    for name in ("ngadam", "soap", "muon"):
        row = next(one for one in lines[start:] if one.startswith(f"| {name} |"))
        assert row.replace(f"| {name} |", f"| {numbers.label(name)} |") in shown
