"""``ngplus tune``: finds an optimizer's hyper-parameters with Optuna, and writes them as a preset."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import options
from ngplus.lab import train as shared

if TYPE_CHECKING:
    import optuna

    from ngplus.lab.optimizers import Range, Rival
    from ngplus.lab.runs import Config, Result
    from ngplus.lab.training import OnLook
    from ngplus.lab.workloads import Task

FAILED = 10.0  # the score of a run that diverged, where steps to the target count
OPENING = (1.0, 1 / 3, 3.0)  # what the default learning rate is multiplied by in the first trials
TUNING_SEED = 100  # a comparison's seeds are 0, 1, 2, …: nothing is tuned on them
MORE_SEEDS = 2  # on which the best trials are run again
BEATEN, BEHIND = "cannot win", "behind"  # why a run of a trial ends early


def register(app: typer.Typer) -> None:
    app.command(name="tune", help=shared.paragraphs(tune))(tune)


@options.with_changes
def tune(
    workload: options.WorkloadNames,
    optimizers: options.OptimizerNames = "ngadam",
    trials: Annotated[int, typer.Option(min=1, help="Runs for each optimizer, those in the storage included.")] = 6,
    storage: Annotated[
        str, typer.Option(help="An Optuna storage: a local file, or a database URL for many machines.")
    ] = "tuning.db",
    preset: options.PresetName = "small",
    seed: Annotated[int, typer.Option(min=0, help="Of Optuna's sampler.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of a trial, seeds 100, 101, …; the score is their mean.")] = 1,
    finalists: Annotated[
        int, typer.Option(min=1, help=f"Trials that are run on {MORE_SEEDS} more seeds at the end; 1 for none.")
    ] = 3,
    objective: Annotated[
        str, typer.Option(help="target: steps until the target; final: the measure at the end.")
    ] = "target",
    limit: Annotated[float | None, typer.Option(min=0, help="CPU seconds after which a run of a trial ends.")] = None,
    sets: options.WorkloadSets = None,
    data: options.Data = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    presets: options.PresetFolder = None,
    *,
    changes: dict[str, Any],
) -> None:
    """Tune an optimizer on a workload: trials with its defaults, a third and three times the learning rate come first.

    The others come from Optuna's TPE sampler. At the end the best of them are run on more seeds; the best mean wins.

    The study stays in the storage: break off at any time, and the same command goes on. Several processes, on several
    machines with a database URL, share the trials of a study. The best settings go into presets/WORKLOAD.json with all
    trials of the study, and train and compare take them from there.

    ngplus tune digits --optimizer all --trials 6

    ngplus tune criteo,qm9 --optimizer adamw,soap,ngplus --limit 120
    """
    console = shared.make_console()
    with shared.friendly(console):
        from ngplus.lab import optimizers as rivals
        from ngplus.lab import presets as tuned

        if objective not in ("target", "final"):
            raise ValueError(f"--objective is target or final, not {objective!r}")
        shared.use_threads(threads, preset)
        wanted = rivals.pick(optimizers)
        suffix = f"{objective}-{seeds}" if seeds > 1 else objective
        parts = []
        for name in shared.listed(workload):
            chosen, size = shared.open_preset(name, preset, changes, sets or [], None)
            plans = []
            for rival in wanted:
                base = shared.configure(chosen, preset, size, rival, seed=TUNING_SEED, hyper={}, presets=presets)
                study = open_study(storage, f"{chosen.name}-{preset}-{rival}-{suffix}", base)
                plans.append(Plan(rivals.get(rival), base, study, trials, finalists, seed, seeds, objective, limit))
            parts.append((shared.open_task(chosen, size, data), plans))
        tuned.check_folder(presets)
        written: set[str] = set()
        # What other processes are at is left to them at first; at the end it is made here if it never came.
        for patient in (True, False):
            for task, plans in parts:
                for plan in plans:
                    with shared.bars(console, plan.most_runs()) as board:
                        while plan.missing(patient) > 0:
                            make_trial(plan, patient, task, device, board)
                        make_finals(plan, patient, task, device, board)
                    if plan.ended() and plan.study.study_name not in written:
                        written.add(plan.study.study_name)
                        path = tuned.store(plan.base, tuned.Tuned(*plan.best()), presets)
                        console.print(f"{plan.sentence()}; written to {shared.shown(str(path))}", highlight=False)
        left = [plan.study.study_name for _, plans in parts for plan in plans if plan.study.study_name not in written]
        if left:
            console.print(f"Another process is still at {', '.join(left)}: the same command goes on", highlight=False)


@dataclass
class Final:
    """The runs of one of the best trials on the first seeds: their scores; and the sum of another's that this one could
    not come below any more, where it was left off."""

    scores: list[float]
    left_off: float = -1.0  # no sum is below 0


@dataclass(frozen=True)
class Plan:
    """The study of one optimizer, and how its trials are made."""

    rival: Rival
    base: Config
    study: optuna.Study
    trials: int
    finalists: int
    seed: int
    seeds: int
    objective: str
    limit: float | None

    def most_runs(self) -> int:
        return self.trials * self.seeds + (self.finalists * self.runs if self.finalists > 1 else 0)

    def missing(self, patient: bool, before: float = math.inf) -> int:
        """Trials still to be made, those that somebody is at not among them where ``patient``; of those with a number
        below ``before``."""
        import optuna

        states = (optuna.trial.TrialState.COMPLETE, *((optuna.trial.TrialState.RUNNING,) if patient else ()))
        return self.trials - sum(t.number < before for t in self.study.get_trials(deepcopy=False, states=states))

    def counted(self) -> list[optuna.trial.FrozenTrial]:
        """Processes that share a study may make a few trials more: every optimizer gets the same number."""
        import optuna

        done = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        return done[: self.trials]

    def ranked(self) -> list[optuna.trial.FrozenTrial]:
        return sorted(self.counted(), key=_value)

    def final(self, trial: optuna.trial.FrozenTrial) -> Final | None:
        """The runs of a finalist; None before they have begun."""
        held = self.study.user_attrs.get(f"final {trial.number}")
        return None if held is None else Final(**held)

    def least(self) -> float:
        """The least sum of scores of a finalist that has all its runs."""
        finals = [self.final(trial) for trial in self.counted()]
        return min((sum(f.scores) for f in finals if f is not None and len(f.scores) == self.runs), default=math.inf)

    @property
    def runs(self) -> int:
        """Of a finalist."""
        return self.seeds + MORE_SEEDS

    def beaten(self, final: Final) -> bool:
        """Can it not win any more?"""
        least = self.least()
        return self.objective == "target" and (sum(final.scores) >= least or final.left_off >= least)

    def ended(self) -> bool:
        """Are all trials there, and all runs of the finalists?"""
        if len(self.counted()) < self.trials:
            return False
        finals = [self.final(trial) for trial in self.ranked()[: self.finalists]]
        return self.finalists == 1 or all(
            final is not None and (len(final.scores) == self.runs or self.beaten(final)) for final in finals
        )

    def winner(self) -> tuple[optuna.trial.FrozenTrial, float]:
        """The best trial and its score: the best mean of the finalists, where there are any."""
        if self.finalists == 1:
            return self.ranked()[0], _value(self.ranked()[0])
        finals = [(trial, self.final(trial)) for trial in self.ranked()]
        full = [(t, statistics.mean(f.scores)) for t, f in finals if f is not None and len(f.scores) == self.runs]
        return min(full, key=lambda pair: pair[1])

    def best(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Settings, changes of the run (none), and how they were found, for the preset and the report."""
        return self.winner()[0].params, {}, story(self)

    def sentence(self) -> str:
        winner, value = self.winner()
        found = ", ".join(f"{key} {value:.4g}" for key, value in winner.params.items())
        where = f"{self.base.workload}, {self.rival.name}"
        return f"{where}: {found}, the best of {shared.count(self.trials, 'trial')} with a score of {value:.4g}"


def make_trial(plan: Plan, patient: bool, task: Task, device: str, board: shared.Board) -> None:
    """The next trial of a study: its runs, and their mean score."""
    import optuna

    study, base = plan.study, plan.base
    trial = study.ask()
    place = plan.trials - plan.missing(patient, before=trial.number)  # of this trial among those that count
    if place >= plan.trials:  # somebody has asked in the same moment
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return
    ranges = narrowed(plan.rival.ranges, plan.counted())
    study.sampler = sampler(opening(plan.rival, place, ranges), plan.seed, trial.number)
    study.pruner = pruner(base.steps)
    hyper = {name: trial.suggest_float(name, r.low, r.high, log=r.log) for name, r in ranges.items()}
    scores = []
    for number in range(plan.seeds):
        config = replace(base, hyper={**base.hyper, **hyper}, seed=TUNING_SEED + number)
        result = make_run(config, task, device, board, stopper(plan, trial, config))
        if result.status == "diverged":
            trial.set_user_attr("diverged", True)
        if result.reason in (BEATEN, BEHIND):
            trial.set_user_attr("cut short", True)
        scores.append(score(config, result, plan.objective))
    trial.set_user_attr("scores", scores)
    study.tell(trial, statistics.mean(scores))


def make_run(config: Config, task: Task, device: str, board: shared.Board, on_look: OnLook) -> Result:
    from ngplus.lab import training

    on_step = board.start(config)
    result = training.run(config, task, device=device, on_step=on_step, on_look=on_look, final=False)
    if result.status == "interrupted":
        raise KeyboardInterrupt
    board.end(config, result)
    return result


def make_finals(plan: Plan, patient: bool, task: Task, device: str, board: shared.Board) -> None:
    """The best trials on more seeds: one seed alone may like a learning rate that others do not. Where ``patient``, a
    process that has begun with them is left to it."""
    if plan.finalists == 1 or len(plan.counted()) < plan.trials or (patient and "finals" in plan.study.user_attrs):
        return
    plan.study.set_user_attr("finals", "begun")
    for trial in plan.ranked()[: plan.finalists]:
        known = [] if trial.user_attrs.get("cut short") else trial.user_attrs.get("scores", [])
        final = plan.final(trial) or Final(list(known))
        while len(final.scores) < plan.runs and not plan.beaten(final):
            hyper = {**plan.base.hyper, **trial.params}
            config = replace(plan.base, hyper=hyper, seed=TUNING_SEED + len(final.scores))
            least = plan.least()
            result = make_run(config, task, device, board, final_stopper(plan, config, least - sum(final.scores)))
            if result.reason == BEATEN:
                final.left_off = least
            else:
                final.scores.append(score(config, result, plan.objective))
        plan.study.set_user_attr(f"final {trial.number}", asdict(final))


def narrowed(ranges: Mapping[str, Range], trials: Iterable[optuna.trial.FrozenTrial]) -> dict[str, Range]:
    """Learning rates that diverged, and half of the smallest of them, are not tried again; the range then reaches down
    to a hundredth of its end at least. How large a step may be depends on the scale of the loss."""
    diverged = [trial.params["lr"] for trial in trials if trial.user_attrs.get("diverged") and "lr" in trial.params]
    held = dict(ranges)
    if diverged and "lr" in held:
        high = min(held["lr"].high, min(diverged) / 2)
        held["lr"] = replace(held["lr"], low=min(held["lr"].low, high / 100), high=high)
    return held


def stopper(plan: Plan, trial: optuna.Trial, config: Config) -> OnLook:
    """Ends a run of which nothing more is to be learned: the rules of ``docs/laboratory.md``, the same for all."""
    scores = [t.value for t in plan.counted() if t.value is not None]
    alone = plan.seeds == 1 and plan.objective == "target"
    # with one run for a trial and steps to the target as its score, there is a step from which on it is no finalist
    better = sorted(scores)[plan.finalists - 1] if len(scores) >= plan.finalists else 1.0
    enough = config.steps * min(1.0, better) if alone else math.inf

    def on_look(step: int, value: float) -> str:
        if not alone:
            return ""
        if config.reached(value):
            return "target reached"
        trial.report(-value if config.higher_is_better else value, step)
        if step == config.steps:
            return ""
        return BEATEN if step >= enough else BEHIND if trial.should_prune() else ""

    return limited(plan.limit, on_look)


def final_stopper(plan: Plan, config: Config, least: float) -> OnLook:
    """Ends a finalist's run at the target, or when its score cannot be below ``least`` any more."""

    def on_look(step: int, value: float) -> str:
        if plan.objective != "target":
            return ""
        if config.reached(value):
            return "target reached"
        return BEATEN if step < config.steps and step >= config.steps * least else ""

    return limited(plan.limit, on_look)


def limited(limit: float | None, on_look: Callable[[int, float], str]) -> OnLook:
    """``on_look`` for looks that have seen the measure; and an end after ``limit`` CPU seconds."""
    start = time.process_time()

    def look(step: int, value: float | None) -> str:
        if limit is not None and time.process_time() - start > limit:
            return "out of time"
        return "" if value is None else on_look(step, value)

    return look


def open_study(storage: str, name: str, base: Config) -> optuna.Study:
    """The study of that name, made where it is not there. ValueError for a storage that cannot be opened, RunError for
    a study whose runs are others."""
    import optuna

    from ngplus.lab.runs import Config, RunError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage if "://" in storage else f"sqlite:///{storage}"
    try:
        held = optuna.create_study(study_name=name, storage=url, direction="minimize", load_if_exists=True)
        settings = held.user_attrs.get("config")
        if settings is None:
            held.set_user_attr("config", base.as_dict())
    except Exception as error:  # each kind of storage has errors of its own
        raise ValueError(f"The storage {storage!r} cannot be opened: {error}") from error
    if settings is not None and (difference := base.difference(Config.from_dict(settings, Path(name)))):
        raise RunError(f"The storage has a study {name} of other runs: {difference}. --storage takes another one")
    return held


def opening(rival: Rival, place: int, ranges: Mapping[str, Range]) -> dict[str, float]:
    """The first trials: the defaults, then with a third and with three times the learning rate; none after them, or
    where that is out of the range."""
    if place >= len(OPENING):
        return {}
    fixed = {name: float(rival.defaults[name]) for name in ranges}
    fixed["lr"] *= OPENING[place]
    inside = all(ranges[name].low <= value <= ranges[name].high for name, value in fixed.items())
    return fixed if inside or place == 0 else {}


def sampler(fixed: Mapping[str, float], *seed: int) -> optuna.samplers.BaseSampler:
    """TPE, each parameter by itself: it is asked when the trial has its number, which is part of the seed. A study that
    goes on, or is shared, does not draw the same random points again."""
    import numpy as np
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar and PartialFixedSampler are marked experimental
        tpe = optuna.samplers.TPESampler(
            seed=int(np.random.SeedSequence(seed).generate_state(1)[0]),  # numbers side by side give points apart
            n_startup_trials=len(OPENING),
            constant_liar=True,  # trials that other processes are at count as bad ones: nobody looks there again
        )
        return optuna.samplers.PartialFixedSampler(dict(fixed), tpe) if fixed else tpe


def pruner(steps: int) -> optuna.pruners.BasePruner:
    """Ends a trial that is behind the median of its study after half of the steps, once two trials are there."""
    import optuna

    return optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=steps // 2)


def score(config: Config, result: Result, objective: str) -> float:
    """Smaller is better. ``target``: the part of the budget that it took; 1 and the relative gap where not reached.
    What diverged is behind everything else."""
    if result.status == "diverged" or result.final is None:
        return FAILED if objective == "target" else math.inf
    if objective == "final":
        return -result.final if config.higher_is_better else result.final
    if result.steps_to_target is not None:
        return result.steps_to_target / config.steps
    gap = abs(config.target - (result.final if math.isfinite(result.final) else math.inf))
    return min(0.9 * FAILED, 1.0 + gap / max(abs(config.target), 1e-12))


def story(plan: Plan) -> dict[str, Any]:
    """How the settings were found, for the preset and the report."""
    import optuna

    limit = {} if plan.limit is None else {"limit of a run in CPU seconds": plan.limit}
    seeds = [TUNING_SEED + number for number in range(plan.runs)]
    finals = {"finalists": plan.finalists, "seeds of the finals": seeds} if plan.finalists > 1 else {}
    trials = []
    for trial in plan.counted():
        final = plan.final(trial) if finals else None
        more = {} if final is None else {"scores of the finals": [_number(value) for value in final.scores]}
        trials.append({"hyper": trial.params, "score": _number(trial.value), **more})
    return {
        "study": plan.study.study_name,
        "sampler": f"Optuna {optuna.__version__}, TPE, seed {plan.seed}",
        "objective": plan.objective,
        "seeds of the runs": seeds[: plan.seeds],
        **finals,
        "steps": plan.base.steps,
        "target": plan.base.target,
        **limit,
        "trials": trials,
    }


def _value(trial: optuna.trial.FrozenTrial) -> float:
    return math.inf if trial.value is None else trial.value


def _number(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
