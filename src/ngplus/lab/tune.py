"""``ngplus tune``: finds an optimizer's hyper-parameters with Optuna, and writes them as a preset."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import options, settings, terminal
from ngplus.lab.search import coordinate, measure
from ngplus.lab.study import (
    MORE_SEEDS,
    TUNING_SEED,
    Final,
    Plan,
    open_study,
    pruner,
    sampler,
    score,
)  # fmt: skip

if TYPE_CHECKING:
    import optuna

    from ngplus.lab.loop import OnEvaluation
    from ngplus.lab.runs import Config, Result
    from ngplus.lab.workloads import Task

BEATEN, BEHIND = "cannot win", "behind"  # why a run of a trial ends early


def register(app: typer.Typer) -> None:
    app.command(name="tune", help=terminal.paragraphs(tune))(tune)


@options.with_changes
def tune(
    workload: options.WorkloadNames,
    optimizers: options.OptimizerNames = "ngadam",
    trials: Annotated[int, typer.Option(min=1, help="Trials of each optimizer, including those in the storage.")] = 12,
    storage: Annotated[
        str, typer.Option(help="Optuna storage: a local file, or a database URL for several machines.")
    ] = "tuning.db",
    preset: options.PresetName = "small",
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of a trial, on the seeds 100, 101, …; the score is their mean.")
    ] = 1,
    finalists: Annotated[
        int, typer.Option(min=1, help=f"Best trials to run on {MORE_SEEDS} more seeds at the end; 1 for none.")
    ] = 3,
    objective: Annotated[
        str, typer.Option(help="Score of a trial: target (steps to it) or final (the measure at the end).")
    ] = "target",
    limit: Annotated[float | None, typer.Option(min=0, help="CPU seconds after which a run ends.")] = None,
    sets: options.WorkloadSets = None,
    data: options.Data = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    presets: options.PresetFolder = None,
    starts: Annotated[
        list[str] | None,
        typer.Option("--start", help="Settings to try as well, such as lr=0.1,damping=0.3; one optimizer, repeatable."),
    ] = None,
    as_json: options.Json = False,
    *,
    changes: dict[str, Any],
) -> None:
    """Tune an optimizer on a workload with Optuna.

    The first trials are spread over the ranges, by Sobol's sequence; the others are near the best one. At the end the
    best trials are run on more seeds; the best mean wins.

    The study stays in the storage: after an interruption the same command continues it, and several processes may share
    it, on several machines with a database URL. The best settings go into presets/WORKLOAD.json with all trials, and
    train and compare take them from there.

    --json prints, for each study that has ended, the best settings, their score, the file and all trials.

    ngplus tune digits --optimizer all --trials 12

    ngplus tune criteo,qm9 --optimizer adamw,soap,ngplus --limit 120
    """
    console = terminal.make_console(as_json)
    with terminal.friendly(console):
        from ngplus.lab import optimizers as known
        from ngplus.lab import presets as tuned

        if objective not in ("target", "final"):
            raise ValueError(f"--objective must be target or final, not {objective!r}")
        settings.use_threads(threads, preset)
        wanted = known.pick(optimizers)
        suffix = f"{objective}-{seeds}" if seeds > 1 else objective
        studies = []
        for name in settings.listed(workload):
            chosen, size = settings.open_preset(name, preset, changes, sets or [], None)
            opened = []
            for optimizer in wanted:
                base = settings.configure(chosen, preset, size, optimizer, seed=TUNING_SEED, hyper={}, presets=presets)
                study = open_study(storage, f"{chosen.name}-{preset}-{optimizer}-{suffix}", base)
                opened.append((known.get(optimizer), base, study))
            studies.append((settings.open_task(chosen, size, data), opened))
        tuned.check_folder(presets)
        parts = []
        for task, opened in studies:
            scales = measure(task, TUNING_SEED, device)
            plans = [Plan(*one, trials, finalists, seeds, objective, limit, scales) for one in opened]
            parts.append((task, plans))
            for plan in plans:
                for start in starts or []:
                    plan.begin_with({key: float(value) for key, value in settings.assignments(start.split(","))})
        written: dict[str, dict[str, Any]] = {}
        interrupted = False
        try:
            # What other processes are at is left to them at first; at the end it is made here if it never came.
            for patient in (True, False):
                for task, plans in parts:
                    for plan in plans:
                        with terminal.bars(console, plan.most_runs()) as board:
                            while plan.missing(patient) > 0:
                                make_trial(plan, patient, task, device, board)
                            make_finals(plan, patient, task, device, board)
                        if plan.ended() and plan.study.study_name not in written:
                            path = tuned.store(plan.base, tuned.Tuned(*plan.best()), presets)
                            written[plan.study.study_name] = plan.document(path)
                            told = f"{plan.sentence()}; written to {terminal.shown(str(path))}"
                            console.print(told, highlight=False)
        except KeyboardInterrupt:
            interrupted = True
        if as_json:
            terminal.print_json(list(written.values()))
        if interrupted:
            told = f"Interrupted: {terminal.shown(storage)} has the trials that ended, and the same command continues"
            console.print(told, highlight=False, soft_wrap=True)
            raise typer.Exit(130)
        left = [plan.study.study_name for _, plans in parts for plan in plans if plan.study.study_name not in written]
        if left:
            console.print(
                f"Another process is still working on {', '.join(left)}: the same command continues", highlight=False
            )


def make_trial(plan: Plan, patient: bool, task: Task, device: str, board: terminal.Board) -> None:
    """The next trial of a study: its runs, and their mean score."""
    import optuna

    study, base = plan.study, plan.base
    trial = study.ask()
    place = plan.trials - plan.missing(patient, before=trial.number)  # of this trial among those that count
    if place >= plan.trials:  # somebody has asked in the same moment
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return
    study.sampler = sampler({} if "start" in trial.user_attrs else plan.point(trial.number))
    study.pruner = pruner(base.steps)
    try:
        for name, r in plan.optimizer.ranges.items():
            trial.suggest_float(coordinate(name, r), r.low, r.high, log=r.log)
        hyper = plan.hyper(trial)
        scores = []
        for number in range(plan.seeds):
            config = replace(base, hyper={**base.hyper, **hyper}, seed=TUNING_SEED + number)
            result = make_run(config, task, device, board, stopper(plan, trial, config))
            if result.reason in (BEATEN, BEHIND):
                trial.set_user_attr("cut short", True)
            scores.append(score(config, result, plan.objective))
    except KeyboardInterrupt:  # else other processes would wait for it
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        raise
    trial.set_user_attr("scores", scores)
    study.tell(trial, statistics.mean(scores))


def make_run(config: Config, task: Task, device: str, board: terminal.Board, on_evaluation: OnEvaluation) -> Result:
    from ngplus.lab import loop

    on_step = board.start(config)
    result = loop.run(config, task, device=device, on_step=on_step, on_evaluation=on_evaluation, final=False)
    if result.status == "interrupted":
        raise KeyboardInterrupt
    board.end(config, result)
    return result


def make_finals(plan: Plan, patient: bool, task: Task, device: str, board: terminal.Board) -> None:
    """Runs the best trials on more seeds: what is best on one seed may diverge on another. Where ``patient``, a process
    that has begun with them is left to it."""
    if plan.finalists == 1 or len(plan.counted()) < plan.trials or (patient and "finals" in plan.study.user_attrs):
        return
    plan.study.set_user_attr("finals", "begun")
    while (trial := plan.next_finalist()) is not None:
        known = [] if trial.user_attrs.get("cut short") else trial.user_attrs.get("scores", [])
        final = plan.final(trial) or Final(list(known))
        while len(final.scores) < plan.runs and not final.diverged and not plan.beaten(final):
            hyper = {**plan.base.hyper, **plan.hyper(trial)}
            config = replace(plan.base, hyper=hyper, seed=TUNING_SEED + len(final.scores))
            least = plan.least()
            result = make_run(config, task, device, board, final_stopper(plan, config, least - sum(final.scores)))
            if result.reason == BEATEN:
                final.left_off = least
            else:
                final.scores.append(score(config, result, plan.objective))
        plan.study.set_user_attr(f"final {trial.number}", asdict(final))


def stopper(plan: Plan, trial: optuna.Trial, config: Config) -> OnEvaluation:
    """Ends a run of which nothing more is to be learned: the rules of ``docs/laboratory.md``, the same for all."""
    scores = [t.value for t in plan.counted() if t.value is not None]
    alone = plan.seeds == 1 and plan.objective == "target"
    # with one run for a trial and steps to the target as its score, there is a step from which on it is no finalist
    better = sorted(scores)[plan.finalists - 1] if len(scores) >= plan.finalists else 1.0
    enough = config.steps * min(1.0, better) if alone else math.inf

    reached = False

    def on_evaluation(step: int, value: float) -> str:
        nonlocal reached
        reached = reached or config.reached(value)
        if not alone or reached:  # it goes on to its last step: it may collapse
            return ""
        trial.report(-value if config.higher_is_better else value, step)
        if step == config.steps:
            return ""
        return BEATEN if step >= enough else BEHIND if trial.should_prune() else ""

    return limited(plan.limit, on_evaluation)


def final_stopper(plan: Plan, config: Config, least: float) -> OnEvaluation:
    """Ends a finalist's run when its score cannot be below ``least`` any more."""
    reached = False

    def on_evaluation(step: int, value: float) -> str:
        nonlocal reached
        reached = reached or config.reached(value)
        if plan.objective != "target" or reached:
            return ""
        return BEATEN if step < config.steps and step >= config.steps * least else ""

    return limited(plan.limit, on_evaluation)


def limited(limit: float | None, on_evaluation: Callable[[int, float], str]) -> OnEvaluation:
    """Calls ``on_evaluation`` where the measure is known, and ends the run after ``limit`` CPU seconds."""
    start = time.process_time()

    def evaluated(step: int, value: float | None) -> str:
        if limit is not None and time.process_time() - start > limit:
            return "out of time"
        return "" if value is None else on_evaluation(step, value)

    return evaluated
