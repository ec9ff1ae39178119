"""The paper's claims held against runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("tensorboard")
pytest.importorskip("typer")

from commands import ngplus
from made_up_runs import run, save

from ngplus.lab import claims

FEWER = claims.Claim("Table 1", "fewer epochs", "0.53", "steps", "digits", "sgd")
LOWER = claims.Claim("Figure 4", "a lower training loss", "drawn", "train_loss", "digits", "sgd")


def verdicts(claim: claims.Claim, *runs: Any, costs: dict[str, float] | None = None) -> tuple[str, ...]:
    return claims.line(claim, runs, costs or {})[3:]


def test_a_claim_is_reproduced_where_one_form_is_ahead() -> None:
    runs = [run("ngplus", rate=0.2), run("ngplus-paper", rate=0.05), run("sgd", rate=0.1)]
    assert verdicts(FEWER, *runs) == ("15 / 25 = 0.60", "50 / 25 = 2.00", claims.REPRODUCED)
    assert verdicts(FEWER, *runs[1:]) == ("–", "50 / 25 = 2.00", claims.NOT_REPRODUCED)
    assert verdicts(LOWER, *runs)[2] == claims.REPRODUCED
    assert verdicts(LOWER, *runs[1:])[2] == claims.NOT_REPRODUCED
    assert verdicts(FEWER, runs[2]) == ("–", "–", claims.NOT_RUN)


def test_means_within_the_spread_of_the_seeds_are_level() -> None:
    """The two differ less than the seeds of each do."""
    ours = [run("ngplus", seed, rate=rate) for seed, rate in enumerate((0.1, 0.2))]
    theirs = [run("sgd", seed, rate=rate) for seed, rate in enumerate((0.12, 0.22))]
    assert verdicts(LOWER, *ours, *theirs)[2] == verdicts(LOWER, *theirs, *ours)[2] == claims.LEVEL


def test_a_target_that_is_lost_again_is_not_reached() -> None:
    kept = run("ngplus", rate=0.2)
    assert kept.result is not None
    lost = replace(kept, result=replace(kept.result, collapsed=True))
    assert verdicts(FEWER, lost, run("sgd", rate=0.1)) == ("never / 25", "–", claims.NOT_REPRODUCED)
    some = [kept, replace(lost, config=replace(kept.config, seed=1))]
    theirs = [run("sgd", rate=0.1), run("sgd", 1, rate=0.1)]
    assert verdicts(FEWER, *some, *theirs)[::2] == ("15 (1 of 2) / 25 = 0.60", claims.NOT_REPRODUCED)


def test_costs_come_from_the_benchmark() -> None:
    what = "{}: training step against SGD, T = 20: ResNet-50, 224 px, batch 32"
    rows = [
        {"row": "rivals", "what": what.format(name), "measured": cost}
        for name, cost in (("NGPlus", 1.1), ("KFAC", 1.3))
    ]
    costs = claims.bench_rows({"rows": [*rows, {"row": "rivals", "what": "NGPlus: another model", "measured": 9.0}]})
    assert costs == {"SGD": 1.0, "NGPlus": 1.1, "KFAC": 1.3}
    cheap, dear = (claims.Claim("Table 1", "", f"x = {n}", "cost", rival="KFAC") for n in (0.87, 0.5))
    assert verdicts(cheap, costs=costs) == ("–", "1.10 / 1.30 = 0.85", claims.REPRODUCED)
    assert verdicts(dear, costs=costs)[2] == claims.NOT_REPRODUCED
    assert verdicts(cheap) == ("–", "–", claims.NOT_RUN)


def test_files_of_a_folder_are_named_together() -> None:
    assert (
        claims.named([Path("a/x.json"), Path("b/y.json"), Path("b/z.json"), Path("runs")]) == "a/x.json b/*.json runs"
    )


def test_the_command_writes_a_page_of_all_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for optimizer, rate in (("ngplus", 0.2), ("sgd", 0.1)):
        save(tmp_path / "runs", run(optimizer, rate=rate, workload="cifar10"))
    said = ngplus("claims", "runs", "--summary", "claims.md")
    assert "1 reproduced, 0 level, 0 not reproduced" in said
    text = Path("claims.md").read_text()
    assert "| Table 1 | fewer epochs than SGD | 40 / 76 = 0.53 | 15 / 25 = 0.60 | – | reproduced |" in text
    assert text.count("\n| ") == 2 + len(claims.CLAIMS)  # the headings, and the rule below them
    Path("empty").mkdir()
    assert "There are no runs in empty" in ngplus("claims", "empty", code=2)


def test_the_page_in_the_documentation_is_that_of_the_committed_runs(tmp_path: Path) -> None:
    from helpers.project import ROOT
    from ngplus.lab import collection

    places = sorted((ROOT / "docs/results-small/steps").glob("*.json"))
    runs = collection.first(collection.find(places))
    costs = claims.bench_rows(json.loads((ROOT / "docs/performance/bench.json").read_text()))
    lines = [claims.line(claim, [r for r in runs if r.config.preset == "small"], costs) for claim in claims.CLAIMS]
    held = (ROOT / "docs/claims.md").read_text()
    assert all("| " + " | ".join(cells) + " |" in held for cells in lines)
