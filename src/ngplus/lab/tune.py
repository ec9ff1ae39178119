"""``ngplus tune``: finds an optimizer's hyper-parameters with Optuna, and writes them as a preset."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import train as shared

if TYPE_CHECKING:
    import optuna

    from ngplus.lab.optimizers import Range
    from ngplus.lab.runs import Config, Result

FAILED = 10.0  # the score of a run that diverged
TUNING_SEED = 100  # a comparison's seeds are 0, 1, 2, …: nothing is tuned on them


def register(app: typer.Typer) -> None:
    app.command(name="tune", help=shared.paragraphs(tune))(tune)


def tune(
    workload: shared.WorkloadName,
    optimizer: Annotated[str, typer.Option("--optimizer", "-o", help="Names with commas between, or all.")] = "ngplus",
    trials: Annotated[int, typer.Option(min=1, help="Runs for each optimizer, those in the storage included.")] = 6,
    storage: Annotated[
        str, typer.Option(help="An Optuna storage: a local file, or a database URL for many machines.")
    ] = "sqlite:///tuning.db",
    preset: shared.PresetName = "small",
    seed: Annotated[int, typer.Option(min=0, help="Of Optuna's sampler.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of a trial, seeds 100, 101, …; the score is their mean.")] = 1,
    objective: Annotated[
        str, typer.Option(help="target: steps until the target; final: the measure at the end.")
    ] = "target",
    sets: shared.Sets = None,
    data: shared.Data = None,
    steps: shared.Steps = None,
    batch_size: shared.BatchSize = None,
    evaluate_every: shared.EvaluateEvery = None,
    target: shared.Target = None,
    schedule: shared.ScheduleName = None,
    warmup: shared.Warmup = None,
    threads: shared.Threads = None,
    device: shared.Device = "cpu",
    presets: shared.PresetFolder = None,
) -> None:
    """Tune an optimizer on a workload: the first trial has its defaults, the others come from Optuna's TPE sampler.

    The study stays in the storage: break off at any time, and the same command goes on. Several processes, on several
    machines with a database URL, share the trials of a study. The best settings go into presets/WORKLOAD.json with all
    trials of the study, and train and compare take them from there. --set here is for options of the workload.

    ngplus tune digits --optimizer all --trials 6
    """
    console = shared.make_console()
    with shared.friendly(console):
        from ngplus.lab import optimizers as rivals
        from ngplus.lab import presets as tuned
        from ngplus.lab import training

        if objective not in ("target", "final"):
            raise ValueError(f"--objective is target or final, not {objective!r}")
        shared.use_threads(threads, preset)
        changes = shared.overrides(
            steps=steps,
            batch_size=batch_size,
            evaluate_every=evaluate_every,
            target=target,
            schedule=schedule,
            warmup=warmup,
        )
        chosen, size = shared.open_preset(workload, preset, changes, sets or [], None)
        wanted = rivals.names() if optimizer == "all" else [n.strip() for n in optimizer.split(",") if n.strip()]
        for name in wanted:
            rivals.get(name).load()
        task = chosen.open(size, data)
        for name in wanted:
            rival = rivals.get(name)
            base = shared.configure(chosen, preset, size, name, seed=TUNING_SEED, hyper={}, presets=presets)
            study = open_study(
                storage, f"{workload}-{preset}-{name}-{objective}" + (f"-{seeds}" if seeds > 1 else ""), seed, trials
            )
            if not study.trials:
                study.enqueue_trial({key: rival.defaults[key] for key in rival.ranges})
            with shared.bars(console, trials * seeds) as board:
                while len(finished(study)) < trials:
                    trial = study.ask()
                    hyper = suggest(trial, rival.ranges)
                    scores = []
                    for number in range(seeds):
                        config = replace(base, hyper={**base.hyper, **hyper}, seed=TUNING_SEED + number)
                        result = training.run(config, task, device=device, on_step=board.start(config))
                        if result.status == "interrupted":
                            raise KeyboardInterrupt
                        scores.append(score(config, result, objective))
                        board.end(config, result)
                    study.tell(trial, statistics.mean(scores))
            # Processes that share a study may make a few trials more: every optimizer gets the same number.
            counted = finished(study)[:trials]
            winner = min(counted, key=lambda trial: math.inf if trial.value is None else trial.value)
            told = story(study.study_name, counted, seed, seeds, objective, base)
            path = tuned.store(workload, preset, name, tuned.Tuned(winner.params, {}, told), presets)
            found = ", ".join(f"{key} {value:.4g}" for key, value in winner.params.items())
            console.print(
                f"{name}: {found}, the best of {len(counted)} trials with a score of {winner.value:.4g}; "
                f"written to {shared.shown(str(path))}",
                highlight=False,
            )


def open_study(storage: str, name: str, seed: int, trials: int) -> optuna.Study:
    """The study of that name, made where it is not there. ValueError for a storage that cannot be opened."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        held = optuna.create_study(study_name=name, storage=storage, direction="minimize", load_if_exists=True)
    except Exception as error:  # each kind of storage has errors of its own
        raise ValueError(f"The storage {storage!r} cannot be opened: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate and constant_liar are marked experimental
        held.sampler = optuna.samplers.TPESampler(
            # a study that goes on must not draw its first random points again
            seed=seed + len(held.trials),
            n_startup_trials=max(2, trials // 3),
            multivariate=True,
            constant_liar=True,  # trials that other processes are at count as bad ones: nobody looks there again
        )
    return held


def finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    import optuna

    return study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))


def suggest(trial: optuna.Trial, ranges: Mapping[str, Range]) -> dict[str, float]:
    return {name: trial.suggest_float(name, r.low, r.high, log=r.log) for name, r in ranges.items()}


def score(config: Config, result: Result, objective: str) -> float:
    """Smaller is better. ``target``: the part of the budget that it took; 1 and the relative gap where not reached."""
    if result.status == "diverged" or result.final is None:
        return FAILED
    if objective == "final":
        return -result.final if config.higher_is_better else result.final
    if result.steps_to_target is not None:
        return result.steps_to_target / config.steps
    gap = abs(config.target - (result.final if math.isfinite(result.final) else math.inf))
    return min(FAILED, 1.0 + gap / max(abs(config.target), 1e-12))


def story(
    name: str, trials: list[optuna.trial.FrozenTrial], seed: int, seeds: int, objective: str, base: Config
) -> dict[str, Any]:
    """How the settings were found, for the preset and the report."""
    import optuna

    return {
        "study": name,
        "sampler": f"Optuna {optuna.__version__}, TPE, seed {seed}",
        "objective": objective,
        "seeds of the runs": [TUNING_SEED + number for number in range(seeds)],
        "steps": base.steps,
        "target": base.target,
        "trials": [{"hyper": trial.params, "score": trial.value} for trial in trials],
    }
