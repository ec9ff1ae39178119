"""A study of ``ngplus tune``: its trials, its finalists and their scores, in an Optuna storage."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngplus.lab.search import Scales, hyper, point_of, points
from ngplus.lab.terminal import count

if TYPE_CHECKING:
    import optuna

    from ngplus.lab.optimizers import OptimizerEntry
    from ngplus.lab.runs import Config, Result

FAILED = 10.0  # the score of a run that diverged, where steps to the target count
GLOBAL_TRIALS = 8  # over the whole ranges; those after them are near the best
TUNING_SEED = 100  # a comparison uses the seeds 0, 1, 2, …: none of them is tuned on
MORE_SEEDS = 2  # on which the best trials are run again


@dataclass
class Final:
    """The scores of a finalist: one of the best trials, run on more seeds."""

    scores: list[float]
    left_off: float = -1.0  # where it was stopped early: the sum of another finalist's scores that it could not beat

    @property
    def diverged(self) -> bool:
        """On one of the seeds."""
        return any(value >= FAILED for value in self.scores)


@dataclass(frozen=True)
class Plan:
    """The study of one optimizer, and how its trials are made."""

    optimizer: OptimizerEntry
    base: Config
    study: optuna.Study
    trials: int
    finalists: int
    seeds: int
    objective: str
    limit: float | None
    scales: Scales

    def hyper(self, trial: optuna.trial.FrozenTrial | optuna.Trial) -> dict[str, float]:
        """The hyper-parameters of a trial, whose own parameters are coordinates."""
        return hyper(self.optimizer.ranges, trial.params, self.scales)

    def point(self, number: int) -> dict[str, float]:
        """The coordinates of the trial of that number: a point of Sobol's sequence over the whole ranges, then near
        the best trial so far. Trials of ``--start`` do not count."""
        before = self.study.get_trials(deepcopy=False)[:number]
        place = sum("start" not in t.user_attrs and t.state.name != "FAIL" for t in before)
        around = self.ranked()[0].params if place >= GLOBAL_TRIALS and self.counted() else None
        return points(self.optimizer.ranges, place + 1, around)[place]

    def begin_with(self, values: Mapping[str, float]) -> None:
        """Queues a trial with these hyper-parameters, once."""
        point = point_of(self.optimizer.ranges, values, self.scales)
        if not any(t.user_attrs.get("start") == point for t in self.study.get_trials(deepcopy=False)):
            self.study.enqueue_trial(point, user_attrs={"start": point})

    def most_runs(self) -> int:
        return self.trials * self.seeds + (self.finalists * self.runs if self.finalists > 1 else 0)

    def missing(self, patient: bool, before: float = math.inf) -> int:
        """Trials still to be made, without those in progress where ``patient``; of those with a number
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
        saved = self.study.user_attrs.get(f"final {trial.number}")
        return None if saved is None else Final(**saved)

    def next_finalist(self) -> optuna.trial.FrozenTrial | None:
        """The next trial to run on more seeds. A finalist that diverges on one of them makes room for the next best
        trial, as long as there is one."""
        standing = 0
        for trial in self.ranked():
            final = self.final(trial) or Final([])
            if final.diverged:
                continue
            if len(final.scores) < self.runs and not self.beaten(final):
                return trial
            standing += 1
            if standing == self.finalists:
                break
        return None

    def least(self) -> float:
        """The least sum of scores of a finalist that has all its runs."""
        finals = [self.final(trial) for trial in self.counted()]
        return min((sum(f.scores) for f in finals if f is not None and len(f.scores) == self.runs), default=math.inf)

    @property
    def runs(self) -> int:
        """Of a finalist."""
        return self.seeds + MORE_SEEDS

    def beaten(self, final: Final) -> bool:
        """Returns True if it cannot win any more."""
        least = self.least()
        return self.objective == "target" and (sum(final.scores) >= least or final.left_off >= least)

    def ended(self) -> bool:
        """Are all trials there, and all runs of the finalists?"""
        return len(self.counted()) >= self.trials and (self.finalists == 1 or self.next_finalist() is None)

    def winner(self) -> tuple[optuna.trial.FrozenTrial, float]:
        """The best trial and its score: the best mean of the finalists, where there are any that did not diverge."""
        finals = [(trial, self.final(trial)) for trial in self.ranked()] if self.finalists > 1 else []
        full = [(trial, final) for trial, final in finals if final is not None and len(final.scores) == self.runs]
        means = [(trial, statistics.mean(final.scores)) for trial, final in full if not final.diverged]
        first = self.ranked()[0]
        return min(means, key=lambda pair: pair[1], default=(first, _value(first)))

    def best(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Settings, changes of the run (none), and how they were found, for the preset and the report."""
        return self.hyper(self.winner()[0]), {}, story(self)

    def document(self, path: Path) -> dict[str, Any]:
        """What was found, for a program, and the preset that has it."""
        winner, value = self.winner()
        found = {"workload": self.base.workload, "preset": self.base.preset, "optimizer": self.optimizer.name}
        return {**found, "hyper": self.hyper(winner), "score": value, "file": str(path), "tuning": story(self)}

    def sentence(self) -> str:
        winner, value = self.winner()
        found = ", ".join(f"{key} {value:.4g}" for key, value in self.hyper(winner).items())
        where = f"{self.base.workload}, {self.optimizer.name}"
        return f"{where}: {found}, the best of {count(self.trials, 'trial')} with a score of {value:.4g}"


def open_study(storage: str, name: str, base: Config) -> optuna.Study:
    """The study of that name, made where it is not there. ValueError for a storage that cannot be opened, RunError for
    a study whose runs are others."""
    import optuna

    from ngplus.lab.runs import Config, RunError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage if "://" in storage else f"sqlite:///{storage}"
    try:
        study = optuna.create_study(study_name=name, storage=url, direction="minimize", load_if_exists=True)
        settings = study.user_attrs.get("config")
        if settings is None:
            study.set_user_attr("config", base.as_dict())
    except Exception as error:  # each kind of storage has errors of its own
        raise ValueError(f"The storage {storage!r} cannot be opened: {error}") from error
    if settings is not None and (difference := base.difference(Config.from_dict(settings, Path(name)))):
        raise RunError(
            f"The storage has a study {name} with other settings: {difference}. Choose another one with --storage"
        )
    return study


def sampler(point: Mapping[str, float]) -> optuna.samplers.BaseSampler:
    """Gives a trial the coordinates of a point."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PartialFixedSampler is marked experimental
        return optuna.samplers.PartialFixedSampler(dict(point), optuna.samplers.RandomSampler())


def pruner(steps: int) -> optuna.pruners.BasePruner:
    """Ends a trial that is behind the median of its study after half of the steps, once two trials are there."""
    import optuna

    return optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=steps // 2)


def score(config: Config, result: Result, objective: str) -> float:
    """Smaller is better. ``target``: the part of the budget that it took; 1 and the relative gap at the end where the
    target was not reached, or lost again. What diverged is behind everything else."""
    if result.status == "diverged" or result.final is None:
        return FAILED if objective == "target" else math.inf
    if objective == "final":
        return -result.final if config.higher_is_better else result.final
    if result.steps_to_target is not None and not result.collapsed:
        return result.steps_to_target / config.steps
    gap = abs(config.target - (result.final if math.isfinite(result.final) else math.inf))
    return min(0.9 * FAILED, 1.0 + gap / max(abs(config.target), 1e-12))


def story(plan: Plan) -> dict[str, Any]:
    """How the settings were found, for the preset and the report."""
    limit = {} if plan.limit is None else {"limit of a run in CPU seconds": plan.limit}
    seeds = [TUNING_SEED + number for number in range(plan.runs)]
    finals = {"finalists": plan.finalists, "seeds of the finals": seeds} if plan.finalists > 1 else {}
    trials = []
    for trial in plan.counted():
        final = plan.final(trial) if finals else None
        more = {} if final is None else {"scores of the finals": [_number(value) for value in final.scores]}
        trials.append({"hyper": plan.hyper(trial), "score": _number(trial.value), **more})
    return {
        "study": plan.study.study_name,
        "sampler": "Sobol, then near the best",
        "objective": plan.objective,
        "seeds of the runs": seeds[: plan.seeds],
        **finals,
        "steps": plan.base.steps,
        "target": plan.base.target,
        **({"scales": plan.scales.as_dict()} if any(r.unit for r in plan.optimizer.ranges.values()) else {}),
        **limit,
        "trials": trials,
    }


def _value(trial: optuna.trial.FrozenTrial) -> float:
    return math.inf if trial.value is None else trial.value


def _number(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
