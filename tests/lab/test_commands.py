"""The commands: what they leave behind, what they do not do twice, and what they say when something is wrong."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("optuna")
pytest.importorskip("plotly")
pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")
pytest.importorskip("typer")
pytest.importorskip("pytorch_optimizer")

from commands import SHORT, ngplus, trials_of
from rich.console import Console
from typer.testing import CliRunner

from ngplus.lab import collection, loop, presets, runs, terminal, workloads
from ngplus.lab.cli import app
from ngplus.lab.workloads.digits import Digits

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_train_leaves_a_folder_and_says_where() -> None:
    said = ngplus("train", "digits", "--optimizer", "adamw", "--lr", "0.01", "--seed", "3", *SHORT)
    run = runs.load(Path("runs/digits-small/adamw-seed3"))
    assert "runs/digits-small/adamw-seed3: finished after 6 steps" in said
    assert run.config.hyper == {"lr": 0.01, "weight_decay": 0.01}
    assert run.config.options == {"width": 4}
    assert (run.config.seed, run.config.steps, run.config.batch_size) == (3, 6, 16)


def test_train_says_what_it_did() -> None:
    """The settings and where they come from, a run that was there already, one that diverged."""
    tuned = presets.lookup("digits", "small", "ngadam", folder=presets.SHIPPED)
    assert tuned is not None
    assert f"With lr {tuned.hyper['lr']} (tuned)" in ngplus("train", "digits", *SHORT)
    assert "nothing was trained" in ngplus("train", "digits", *SHORT)
    said = ngplus("train", "digits", "-o", "sgd", "--lr", "1e9", "--out", "far", *SHORT, code=1)
    assert "diverged" in said
    assert "1 steps" not in said
    assert "given here" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "digits", "--device", "cuda:77"], "--device cuda:77 cannot be used"),
        (["train", "digits", "--device", "nowhere"], "--device nowhere cannot be used"),
        (["compare", "digits", "--presets", "missing"], "--presets must be an existing folder, not missing"),
        (["train", "digits", "--out", "file/below"], "file"),
        (["train", "digits", "--out", "file"], "--out file cannot be created, since file is a file"),
        (["compare", "digits", "--out", "file/below"], "--out file/below cannot be created, since file is a file"),
        (["plan", "digits", "--distribution", "memory"], "can only be used with --ranks"),
        (["train", "digits", "--seed", "9" * 20], "--seed"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_and_leaves_no_folder(arguments: list[str], told: str) -> None:
    Path("file").touch()
    assert told in ngplus(*arguments, code=2)
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_the_version_is_told() -> None:
    assert torch.__version__ in ngplus("--version")


def test_compare_keeps_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["compare", "digits", "--optimizers", "sgd,ngplus", "--seeds", "2", *SHORT]
    said = ngplus(*arguments)
    assert "ngplus" in said
    assert "steps to target" in said
    made = sorted(path.name for path in Path("runs/digits-small").iterdir())
    assert made == ["ngplus-seed0", "ngplus-seed1", "sgd-seed0", "sgd-seed1"]
    (Path("runs/digits-small/sgd-seed1") / "result.json").unlink()
    steps: list[str] = []
    real = loop._Session

    class Counted(real):  # type: ignore[valid-type, misc]
        def __init__(self, config: Any, *rest: Any) -> None:
            steps.append(f"{config.optimizer}-seed{config.seed}")
            super().__init__(config, *rest)

    monkeypatch.setattr(loop, "_Session", Counted)
    ngplus(*arguments)
    assert steps == ["sgd-seed1"]
    said = ngplus(*arguments, "--warmup", "1", code=2)
    assert "warmup 5 there and 1 now" in said
    assert "--fresh" in said
    ngplus(*arguments, "--warmup", "1", "--fresh")
    assert len(steps) == 5


def test_a_narrow_terminal_cuts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["compare", "digits", "--optimizers", "shampoo,adam", "--seeds", "2", *SHORT]
    assert "best" in ngplus(*arguments)
    for width, gone, kept in ((96, "best", "state"), (80, "best", "ms a step"), (66, "ms a step", "at the end")):
        monkeypatch.setattr(terminal, "make_console", lambda as_json, width=width: Console(width=width))
        table = ngplus(*arguments).partition("┏")[2].partition("└")[0]
        assert "shampoo" in table
        assert "…" not in table
        assert gone not in table
        assert kept in table


@pytest.mark.parametrize("gone", ["config.json", "metrics.jsonl"])
def test_an_ended_run_of_which_a_file_is_gone_is_damaged_for_all_commands(gone: str) -> None:
    arguments = ["compare", "digits", "--optimizers", "sgd,adam", "--seeds", "1", *SHORT]
    ngplus(*arguments)
    (Path("runs/digits-small/sgd-seed0") / gone).unlink()
    assert f"without {gone}" in ngplus(*arguments, code=2)
    if gone == "metrics.jsonl":  # a folder without a configuration may be anything
        assert f"without {gone}" in ngplus("report", "runs", code=2)
    ngplus(*arguments, "--fresh")
    assert "2 runs in" in ngplus("report", "runs", "--no-png")


def test_an_option_that_is_refused_leaves_the_folder_free() -> None:
    assert "learning rate" in ngplus("train", "digits", "--lr", "-1", code=2)
    assert "finished" in ngplus("train", "digits", *SHORT)
    assert "learning rate" in ngplus("train", "digits", "-o", "adam", "--lr", "-1", code=2)
    ngplus("compare", "digits", "--optimizers", "adam", "--seeds", "1", *SHORT)


def test_compare_tells_of_runs_that_other_code_has_made() -> None:
    arguments = ["compare", "digits", "--optimizers", "sgd,adam", "--seeds", "1", *SHORT]
    other = "come from another version of the code"
    assert other not in ngplus(*arguments)
    assert other not in ngplus(*arguments)
    place = Path("runs/digits-small/sgd-seed0/environment.json")
    runs.write_json(place, {**runs.load(place.parent).environment, "code": "0123456789ab"})
    assert f"Of these 2 runs 1 {other}" in ngplus(*arguments)
    place.unlink()  # as of a run from before there was such a number
    assert f"Of these 2 runs 1 {other}" in ngplus(*arguments)
    assert other not in ngplus(*arguments, "--fresh")


def test_the_digest_is_that_of_the_code_a_curve_comes_from(tmp_path: Path) -> None:
    def digest(number: int, **files: str) -> str:
        package = tmp_path / str(number) / "ngplus"
        for name in ("solve", "layers/conv", "lab/loop", "lab/schedules", "lab/workloads/digits", "lab/bench/rows"):
            path = package / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files.get(name.rpartition("/")[2], "pass"))
        return runs.code_digest(package)

    plain = digest(0)
    assert digest(1) == plain == digest(2, rows="1")
    for number, name in enumerate(("solve", "conv", "loop", "schedules", "digits"), 3):
        assert digest(number, **{name: "1"}) != plain
    assert len(runs.code_digest()) == 12


def test_runs_that_diverge_are_recorded_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from ngplus.lab import optimizers

    names = ("sgd", "adam", "ngplus", "kfac", "ngadam")  # the last three leave out steps that are not finite
    wild = {name: {"hyper": {"lr": 1e30}, "run": {}} for name in names}
    Path("presets").mkdir()
    Path("presets/digits.json").write_text(json.dumps({"presets": {"small": wild}}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = ngplus("compare", "digits", "-o", ",".join(names), "--seeds", "1", *SHORT)
        assert "sgd (1 diverged)" in said
        assert " 0 B" not in said
        assert "adam (1 diverged)" in said
        assert len(collection.find([Path("runs")])) == 5
        wild_rates = {"lr": optimizers.Range(1e29, 1e31)}
        monkeypatch.setattr(
            optimizers,
            "OPTIMIZERS",
            {**optimizers.OPTIMIZERS, "sgd": replace(optimizers.get("sgd"), ranges=wild_rates)},
        )
        ngplus("tune", "digits", "-o", "sgd", "--trials", "2", *SHORT)
    assert trials_of("sgd")[0]["score"] == 10.0
    assert len(trials_of("sgd")) == 2


def test_compare_takes_several_workloads() -> None:
    said = ngplus("compare", "digits,autoencoder", "-o", "adam", "--seeds", "1", "--steps", "2", "--out", "both")
    assert "Digits, small CNN" in said
    assert "autoencoder" in said
    assert [run.config.workload for run in collection.find([Path("both")])] == ["autoencoder", "digits"]
    assert "No workload is named" in ngplus("compare", ",", code=2)


def test_plan_of_a_workload_and_of_any_model() -> None:
    assert "0.weight + bias" in ngplus("plan", "digits", "--optimizer", "ngplus")
    assert "both" in ngplus("plan", "digits")
    rows = json.loads(ngplus("plan", "autoencoder", "--json", "--optimizer", "ngplus", "--set", "block_size=32"))
    assert rows[0]["shape"] == [256, 65]
    assert rows[0]["blocks"] == 3  # the right side, 65 wide
    assert "encoder.layers.0" in ngplus("plan", "torch.nn:Transformer", "--batch-size", "4", "--positions", "10")


def test_plan_past_this_machine() -> None:
    """10 million rows on the meta device: nothing of the table's size is kept, and nothing is allocated."""
    arguments = ["plan", "ngplus.lab.scale:dlrm_10m", "--ranks", "8", "--ranks", "512"]
    loads = json.loads(ngplus(*arguments, "--distribution", "memory", "--json"))
    assert [load["ranks"] for load in loads] == [8, 512]
    assert all(load["parameter_bytes"] > 3e9 and load["state_bytes"] < 1e7 for load in loads)
    table = ngplus(*arguments)
    assert "| 512 | communication | 3.2 GB |" in table
    assert "Invalid distribution" in ngplus(*arguments, "--distribution", "nowhere", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "digit"], "did you mean 'digits'"),
        (["train", "digits", "-o", "adm"], "did you mean 'adam'"),
        (["train", "digits", "--preset", "smal"], "did you mean 'small'"),
        (["train", "digits", "-o", "adam", "--set", "beta=1"], "did you mean 'betas'"),
        (["train", "digits", "--set", "lr"], "KEY=VALUE"),
        (["train", "digits", "--set", "width.x=1"], "'width' of digits is not a group"),
        (["train", "digits", "--schedule", "cosin"], "did you mean 'cosine'"),
        (["train", "digits", "--lr", "-1"], "learning rate"),
        (["train", "digits", "--set", "damping=[1]"], "damping"),
        (["train", "digits", "--lr", "inf"], "--lr must be a finite number"),
        (["train", "digits", "--set", "lr=Infinity"], "--set lr takes a finite number"),
        (["train", "digits", "--target", "nan"], "--target must be a finite number"),
        (["train", "digits", "--set", "width=-3"], "digits does not work with these settings: "),
        (["train", "digits", "--set", "width=0"], "with these settings: "),
        (["plan", "digits", "--set", "width=-3"], "with these settings: "),
        (["train", "digits", "--set", "width=null"], "--set width takes a whole number, not null"),
        (["train", "digits", "--set", "width=abc"], '--set width takes a whole number, not "abc"'),
        (["train", "digits", "--set", "width=1.5"], "--set width takes a whole number, not 1.5"),
        (["train", "digits", "--set", "width=true"], "--set width takes a whole number, not true"),
        (["train", "autoencoder", "--set", "widths=[8, 1.5]"], "each number of widths takes a whole number, not 1.5"),
        (["train", "digits", "--set", "process_group=3"], "no setting of ngadam or digits 'process_group'"),
        (["train", "digits", "--set", "distribution=memory"], "no setting of ngadam or digits 'distribution'"),
        (["train", "digits", "-o", "adamw", "--set", "betas=3"], "--set betas takes a list"),
        (
            ["train", "digits", "-o", "adamw", "--set", "foreach=true", "--set", "fused=true"],
            "adamw does not work with these settings",
        ),
        (["train", "digits", "--device", "meta"], "--device meta holds no values"),
        (["train", "digits", "--threads", "100000"], "--threads 100000 is too large"),
        (["compare", "digits", "--optimizers", "sgd,nope"], "no optimizer 'nope'"),
        (["compare", "digits", "--optimizers", ","], "No optimizer is named"),
        (["compare", "digits", "--set", "lr=1"], "no setting of digits 'lr'"),
        (["tune", "digits", "--storage", "nonsense://x"], "cannot be opened"),
        (["tune", "digits", "--objective", "speed"], "target or final"),
        (["report", "nowhere"], "no folder nowhere"),
        (["report", "."], "no runs in"),
        (["plan", "torch.nn:Linear"], "without arguments"),
        (["plan", "nothing.here:Model"], "cannot be imported"),
        (["plan", "digits", "-o", "sgd"], "has no plan"),
    ],
)
def test_errors_are_sentences(arguments: list[str], words: str) -> None:
    said = ngplus(*arguments, code=2)
    assert words in said
    assert "Traceback" not in said


def test_a_workload_without_its_data_says_what_to_do() -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("transformers")
    said = ngplus("train", "cifar10", code=2)
    assert "NGPLUS_DATA" in said


@pytest.mark.parametrize(
    ("workload", "setting", "words"),
    [
        ("multi30k", "model.banana=7", "no option of multi30k.model 'banana'"),
        ("cifar10", "model.banana=7", "no option of cifar10.model 'banana'"),
        ("cifar10", 'model={"banana": 7}', "no option of model 'banana'"),
        ("multi30k", "model.dropout=0.1", "NGPLUS_DATA"),  # not in the preset, but read
        ("cifar10", "micro_batch=null", "NGPLUS_DATA"),
        ("cifar10", "model.downsample_in_bottleneck=true", "NGPLUS_DATA"),
        ("criteo", "rows=100", "NGPLUS_DATA"),
        ("criteo", "model.sparse=true", "NGPLUS_DATA"),
        ("qm9", "loss_unit=eV", "NGPLUS_DATA"),
    ],
)
def test_an_option_that_nobody_reads_is_refused(workload: str, setting: str, words: str) -> None:
    for library in ("PIL", "transformers", "tokenizers", "torch_geometric"):
        pytest.importorskip(library)
    assert words in ngplus("train", workload, "--set", setting, code=2)


def test_options_that_a_workload_cannot_work_with_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Demanding(Digits):
        def open(self, preset: Any, data: Path | None) -> Any:
            return preset.options["model"]["cutoff"]

    monkeypatch.setattr(workloads, "get", lambda name: Demanding())
    assert "digits does not work with these settings: 'model' is missing" in ngplus("train", "digits", code=2)


def test_a_workload_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the documentation, by train, compare and tune."""
    page = (Path(__file__).parents[2] / "docs" / "laboratory.md").read_text()
    code = page.partition("With this in `mine.py`,")[2].partition("```python\n")[2].partition("```")[0]
    Path("mine.py").write_text(code)
    Path("wrong.py").write_text(
        "from mine import *\n"
        "class Digits(Waves):\n    name = 'digits'\n"
        "class Nameless(Workload):\n    open = Waves.open\n"
        "class Closed(Workload):\n    name = 'closed'\n"
        "class Other:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    ngplus("train", "mine:Waves", *SHORT)
    ngplus("compare", "mine:Waves,digits", "--optimizers", "adam", "--seeds", "1", "--out", "both", *SHORT)
    ngplus("tune", "mine:Waves", "-o", "adam", "--trials", "1", "--finalists", "1", *SHORT)
    assert runs.load(Path("runs/waves-small/ngadam-seed0")).config.options == {"width": 4}
    assert sorted(path.name for path in Path("both").iterdir()) == ["digits", "waves"]
    assert Path("presets/waves.json").exists()
    assert "no setting of ngadam or waves 'wdth'" in ngplus("train", "mine:Waves", "--set", "wdth=3", code=2)
    for name, words in {
        "nowhere:Waves": "PYTHONPATH=.",
        "mine:Wave": "cannot be imported",
        "wrong:Digits": "give it another",
        "wrong:Nameless": "has no 'name'",
        "wrong:Closed": "cannot be created",
        "wrong:Other": "not Other",
    }.items():
        assert words in ngplus("train", name, code=2)


def test_hostile_names_do_not_reach_the_terminal() -> None:
    said = CliRunner().invoke(app, ["train", "digits\x1b[31m[red]"]).output
    assert "\x1b" not in said
    assert "[red]" in said


def test_a_damaged_preset_is_named() -> None:
    Path("presets").mkdir()
    Path("presets/digits.json").write_text('{"presets": {"small": {"sgd": {"hyper": [], "run": {}}}}}')
    assert "presets/digits.json" in ngplus("train", "digits", "-o", "sgd", code=2)
    for wrong in ('{"steps": "x"}', '{"steps": 0}', '{"warmup": true}', '{"schedule": 1}', '{"lr": 1}'):
        content = f'{{"presets": {{"small": {{"sgd": {{"hyper": {{}}, "run": {wrong}}}}}}}}}'
        Path("presets/digits.json").write_text(content)
        assert "has a damaged entry" in ngplus("train", "digits", "-o", "sgd", code=2)
    Path("presets/digits.json").write_text("{")
    assert "presets/digits.json" in ngplus("train", "digits", "-o", "sgd", code=2)
