"""The benchmark: its arithmetic on made-up times, its files, and a quick run of every row. No time is asserted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ngplus

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_optimizer")
pytest.importorskip("sklearn")
pytest.importorskip("transformers")
pytest.importorskip("typer")

from typer.testing import CliRunner

from helpers.steps import PAPER
from ngplus.lab.bench import bare, measuring, processes, profiling, record, rows, state, timing
from ngplus.lab.cli import app

RESNET = {
    "sgd.pass": 10.0, "sgd.step": 0.5, "again.pass": 10.1, "ngplus.plain.pass": 10.0, "ngplus.plain.step": 0.7,
    "ngplus.refresh.pass": 11.0, "ngplus.refresh.step": 1.0,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def made_up(seconds: dict[str, float], rounds: int = 3, quick: bool = False, **numbers: Any) -> record.Measurement:
    """A measurement whose CPU times are twice its wall times and whose rounds are 1, 2, 3, … times as slow."""
    scale = np.arange(1, rounds + 1)[:, None] * np.array([[1.0, 2.0]])
    times = {name: value * scale for name, value in seconds.items()}
    return record.Measurement.now(record.Taken(times, {"problem": "a model", **numbers}), record.Setting(rounds, quick))


def command(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


# ------------------------------------------------------------------------------------------------ arithmetic


def test_turns_are_interleaved_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def turn(name: str) -> Callable[[timing.Stopwatch], None]:
        def take(watch: timing.Stopwatch) -> None:
            order.append(name)
            with watch.time(name):
                time.sleep(0.001)

        return take

    times = timing.take_turns({name: turn(name) for name in "abc"}, repeats=3, warmup=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert {name: x.shape for name, x in times.items()} == dict.fromkeys("abc", (3, 2))
    assert all((x[:, 0] >= 0.001).all() and (x >= 0).all() for x in times.values())


def test_medians_are_of_paired_ratios() -> None:
    # A slow round hits both alike: their ratio does not see it, that of their medians would.
    ours, base = np.array([2.0, 40.0, 3.0]), np.array([1.0, 20.0, 2.0])
    spread = timing.Spread.of(ours / base)
    assert (spread.median, spread.low, spread.high) == (2.0, 1.75, 2.0)


def test_amortised_cost_and_exponent() -> None:
    plain, refresh = np.array([[1.0, 2.0]]), np.array([[3.0, 5.0]])
    assert timing.amortised(plain, refresh, 20) == pytest.approx(np.array([[22 / 20, 43 / 20]]))
    assert timing.amortised(plain, refresh, 1) == pytest.approx(refresh)
    sizes = [256, 512, 1024, 8192]
    power = [np.array([[3.0 * m**1.25, 0.5 * m], [7.0 * m**0.5, 1.0]]) for m in sizes]
    assert timing.exponents(sizes, power) == pytest.approx(np.array([[1.25, 1.0], [0.5, 0.0]]))


def test_rows_of_training_steps() -> None:
    one = made_up(RESNET)
    found = {row.group: row for row in rows.rows_of({"resnet": one})}
    assert found["step"].spread.median == pytest.approx((19 * 10.7 + 12.0) / 20 / 10.5)
    assert found["step-256"].spread.median == pytest.approx((499 * 80.7 + 89.0) / 500 / 80.5)
    assert found["build"].spread.median == pytest.approx(0.1)
    assert found["inverses"].spread.median == pytest.approx(0.03)
    assert found["capture"].spread.median == pytest.approx(1.0)
    assert "1.010" in found["capture"].note
    assert all(row.cpu == pytest.approx(row.spread.median) for row in found.values())
    assert (found["step"].asked, found["step"].reached) == (1.06, True)
    slower = made_up({**RESNET, "ngplus.plain.step": 2.0})
    assert not rows.rows_of({"resnet": slower}, ["step"])[0].reached
    assert rows.rows_of({"resnet": made_up(RESNET, quick=True)}, ["step"])[0].reached is None


def test_a_slow_pass_of_one_round_is_not_in_the_added_cost() -> None:
    one = made_up({**RESNET, "ngplus.plain.pass": 12.0, "ngplus.refresh.pass": 13.0})
    same = rows.added_cost(one.times, "ngplus", "sgd", 20)
    assert same == pytest.approx((19 * 10.7 + 12.0) / 20 / 10.5)
    assert rows.rows_of({"resnet": one}, ["step"])[0].spread.median > float(same[0, 0]) + 0.1


def test_noise_decides_what_within_noise_means() -> None:
    values = np.array([[0.98, 1.0], [1.02, 1.0], [1.03, 1.0]])
    assert rows.Row("", "", values, 1.0, within_noise=True).reached
    assert not rows.Row("", "", values, 1.0).reached
    assert not rows.Row("", "", values + 0.05, 1.0, within_noise=True).reached


def test_rows_of_memory_state_and_embedding() -> None:
    peaks = {name: [100.0] for name in processes.MEMORY} | {"refresh": [120.0]}
    memory = rows.rows_of({"memory": made_up({}, peaks=peaks)})
    assert [(row.spread.median, row.reached) for row in memory] == [(1.2, False), (1.0, None), (1.0, None)]
    sizes = {"sample": {"inverse": 25, "momentum_buffer": 100}, "soap": {"Q": 200, "GG": 200, "exp_avg": 100}}
    bytes_kept = rows.rows_of({"state": made_up({}, states=sizes, gradients=100)})
    assert [row.spread.median for row in bytes_kept] == [0.25, 4.0]
    assert bytes_kept[1].note.startswith("5.00 ")
    methods = ("ngplus", "ngadam")
    times = {"sgd.pass": 1.0, "sgd.step": 1.0}
    times |= {f"{m}.{kind}.{part}": 2.0 for m in methods for kind in ("plain", "refresh") for part in ("pass", "step")}
    peaks = {"sgd": {"peak": 1_000_000}, **{m: {"peak": 41_000_000} for m in methods}}
    table = rows.rows_of({"embedding": made_up(times, rows=100, width=4, touched=10, peaks=peaks)})
    assert [(row.spread.median, row.unit, row.reached) for row in table[:2]] == [
        (2.0, "ratio", True),
        (40.0, "MB", True),
    ]


def test_rival_steps_share_the_pass_of_the_base() -> None:
    seconds = {"base.pass": 10.0, "sgd.step": 1.0, "adamw.step": 2.0, "muon.step": 5.0}
    for name in ("shampoo", "soap", "kfac", "ngplus", "ngadam"):
        seconds |= {f"{name}.plain.step": 2.0, f"{name}.refresh.step": 22.0}
    seconds |= {"kfac.plain.pass": 12.0, "kfac.refresh.pass": 32.0}
    found = rows.rival_steps(made_up(seconds).times)
    assert found["adamw"] == pytest.approx(12 / 11)
    assert found["soap"] == pytest.approx((10 + 3) / 11)
    assert found["kfac"] == pytest.approx((10 + 3 + 1) / 11)


def test_bare_products_do_the_plan_s_work() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 20), nn.Conv1d(1, 6, 3, groups=1), nn.Flatten(), nn.Linear(108, 90))
    for options in ({}, {"block_size": 8, "solver": "dense"}):
        optimizer = ngplus.NGPlus(model, lr=1e-3, damping=0.3, **{**PAPER, **options})
        model.zero_grad()
        model(torch.randn(5, 1, 40)).square().sum(1).mean().backward()
        optimizer.step()
        plan = optimizer.plan()
        for row in plan:
            with FlopCounterMode(display=False) as counter:
                for product in bare.products_of(row):
                    product()
            # a block that is not full counts as full
            assert row.step_flops <= counter.get_total_flops() <= 1.5 * row.step_flops, row
        solvers = {row.solver for row in plan}
        assert solvers == ({"dense"} if options else {"dense", "woodbury"})


# ------------------------------------------------------------------------------------------------ state, profile


def test_bytes_by_name_and_what_counts_as_curvature() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = ngplus.NGPlus(model, lr=1e-3, solver="dense", damping=0.3, **PAPER)
    model(torch.randn(5, 6)).square().sum(1).mean().backward()
    optimizer.step()
    found = state.bytes_by_name(optimizer.state_dict())
    assert found["inverse"] == 4 * (4 * 4 + 3 * 3)
    assert found["momentum_buffer"] == sum(4 * p.numel() for p in model.parameters())
    assert state.curvature_bytes(found) == sum(found.values()) - found["momentum_buffer"]


def _event(name: str, kind: str, start: float, length: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": length, "pid": 1, "tid": thread}


def test_a_profile_counts_each_moment_once() -> None:
    events = [
        _event("bench:forward", "user_annotation", 0, 100),
        _event("aten::mm", "cpu_op", 10, 50),
        _event("aten::mm", "cpu_op", 10, 50, thread=2),  # another thread's
        _event("bench:backward", "user_annotation", 100, 100),
        _event("ngplus/gathering.py(90): _gather", "python_function", 120, 60),
        _event("aten::bmm", "cpu_op", 130, 20),
        _event("ngplus/layers/conv.py(9): backward", "python_function", 182, 6),  # the layer's own pass
        # An annotation that begins inside of a function and outlives it.
        _event("torch/profiler.py(1): __enter__", "python_function", 190, 20),
        _event("bench:step", "user_annotation", 200, 100),
        _event("ngplus/base.py(1): _refresh", "python_function", 220, 30),
        _event("<built-in method inv>", "python_function", 225, 20),
        _event("aten::inv", "cpu_op", 230, 10),
        _event("ngplus/update.py(1): update_parameters", "python_function", 260, 30),
    ]
    shares = profiling.shares_of(events)
    seconds = {part: round(1e6 * share.seconds) for part, share in shares.items() if share.seconds}
    assert seconds == {
        "forward": 100, "backward": 40, "capture products": 60, "inverses": 30, "update": 30, "step, other": 40,
    }  # fmt: skip
    assert shares["inverses"].operations == pytest.approx({"Python _refresh": 20e-6, "aten::inv": 10e-6})


def test_the_profile_s_frame_is_that_of_the_optimizer() -> None:
    from ngplus.optimizers import base
    from ngplus.preconditioners.inverse_root import RootsPreconditioner

    for name in profiling.FRAME:
        assert any(hasattr(place, name) for place in (ngplus.NGPlus, base, RootsPreconditioner)), name


# ------------------------------------------------------------------------------------------------ files and the command


def test_measurements_are_kept_until_they_are_taken_again() -> None:
    path = Path("bench/bench-quick.json")
    measuring.keep(Path("bench/bench.json"), {"resnet": made_up(RESNET)})
    whole = Path("bench/bench.json").read_bytes()
    command("ngadam", "growth", "--quick", "--repeats", "1")
    first = record.load(path)
    assert set(first) == {"ngadam", "ngadam-transformer", "ngadam-mlp", "growth"}
    assert first["growth"].times["16.plain.step"].shape == (1, 2)
    command("growth", "--quick")
    second = record.load(path)
    assert second["ngadam"].as_dict() == first["ngadam"].as_dict()
    assert (first["growth"].repeats, second["growth"].repeats) == (1, 2)
    assert measuring.needed(["ngadam", "growth", "bare"], path, quick=True, resume=True) == ["bare"]
    assert measuring.needed(["growth"], path, quick=False, resume=True) == ["growth"]
    content = json.loads(path.read_text())
    assert [row["row"] for row in content["rows"]] == ["ngadam"] * 12 + ["growth"] * 2
    assert all(row["when"] and row["quick"] and row["measured"] > -10 for row in content["rows"])
    assert set(content["measurements"]["growth"]["environment"]) >= {"torch", "threads", "cores", "processor"}
    assert "command" not in content["measurements"]["growth"]["environment"]
    assert Path("bench/bench.json").read_bytes() == whole  # quick ones have a file of their own


def test_the_markdown_table_comes_from_the_file() -> None:
    measuring.keep(Path("bench/bench.json"), {"resnet": made_up(RESNET)})
    result = CliRunner().invoke(app, ["bench", "step", "build", "--table"])
    lines = [line for line in result.output.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines] == ["row", "---", "step", "build"]
    assert "| 1.060 | 1.025 | 1.025 to 1.025 | 1.025 | yes |" in lines[2]
    assert "Measured on" in result.output
    assert not Path("bench/bench.png").exists()


def test_json_has_the_rows_of_the_file() -> None:
    measuring.keep(Path("bench/bench.json"), {"resnet": made_up(RESNET)})
    result = CliRunner().invoke(app, ["bench", "step", "--show", "--json"])
    held = [row for row in json.loads(Path("bench/bench.json").read_text())["rows"] if row["row"] == "step"]
    assert json.loads(result.stdout) == {"rows": held}
    assert "ngplus bench" in result.stderr
    assert "--json prints the rows" in command("step", "--table", "--json", code=2)


def test_what_the_command_refuses() -> None:
    assert "did you mean 'memory'" in command("memry", code=2)
    assert "no measurements" in command("step", "--table", code=2)
    Path("bench").mkdir()
    Path("bench/bench.json").write_text("[]")
    assert "not the file of a benchmark" in command("import", "--show", code=2)
    assert "transformer" in command("--profile", "step", "--quick", code=2)


def test_the_list_of_rows() -> None:
    said = command("--list")
    assert all(name in said for name in rows.ROWS)
    assert {name for group in rows.ROWS.values() for name in group.makers} == set(measuring.MEASUREMENTS)


@pytest.mark.slow
def test_a_quick_run_of_the_rows() -> None:
    most = [name for name in rows.ROWS if name != "memory"]  # five processes; one of them is below
    said = command(*most, "--quick", "--repeats", "1")
    content = json.loads(Path("bench/bench-quick.json").read_text())
    assert {row["row"] for row in content["rows"]} == set(most)
    assert set(content["measurements"]) == set(measuring.MEASUREMENTS) - {"memory"}
    assert all(np.isfinite([row["measured"], *row["quartiles"]]).all() for row in content["rows"])
    assert "quick models" in said
    assert all(Path(f"bench/bench-quick.{kind}").stat().st_size > 1000 for kind in ("png", "svg"))


@pytest.mark.slow
def test_a_process_tells_its_own_peak() -> None:
    options = processes.MEMORY["refresh"]
    peak = processes.in_process("steps", problem="mlp", quick=True, **options)["peak"]
    assert 50 * 2**20 < peak < 2**31
    assert processes.peak_bytes() > 50 * 2**20


@pytest.mark.slow
def test_a_quick_profile() -> None:
    said = command("--profile", "mlp", "--quick")
    assert "capture products" in said
    content = json.loads(Path("bench/profile-mlp.json").read_text())
    assert set(content) == {f"{s}, {kind}" for s in ("ngplus", "ngadam") for kind in ("refresh", "plain")}
    for kind, parts in content.items():
        assert parts["directions"]["seconds"] > 0
        if kind.startswith("ngplus"):
            assert (parts["capture products"]["seconds"] > 0) == ("refresh" in kind)
    assert content["ngadam, refresh"]["inverses"]["seconds"] > content["ngadam, plain"]["inverses"]["seconds"]
    assert Path("bench/profile-mlp.svg").exists()
