"""Training steps: a forward and backward pass and the optimizer's step, timed apart, with and without a refresh.

Everything is measured by public behaviour. ``update_every=2`` makes steps with and without a refresh alternate, so that
each round has one of both. What a refresh adds to the pass is the building of all L or R (the capture and its products,
which happen during backward); what it adds to the step is their inverses or bases.
"""

from __future__ import annotations

from typing import Any

import ngplus
from ngplus.lab import optimizers
from ngplus.lab.bench.problems import PROBLEMS, Problem
from ngplus.lab.bench.record import Setting, Taken
from ngplus.lab.bench.timing import Stopwatch, Turn, take_turns
from ngplus.lab.optimizers import PAPER_FORM

# Small rates: the weights must stay where the numbers are ordinary ones, however many steps are made.
NGPLUS: dict[str, Any] = {**PAPER_FORM, "lr": 1e-5, "momentum": 0.9, "damping": 0.3}
NGADAM: dict[str, Any] = {"lr": 1e-6}
QUARTER: dict[str, dict[str, Any]] = {"quarter": {"samples": 0.25}}  # L and R from a quarter of the batch
FIRST_ORDER: dict[str, dict[str, Any]] = {"sgd": {"lr": 1e-5, "momentum": 0.9}, "adamw": {"lr": 1e-6}}


class Contender:
    """A model of its own and its optimizer."""

    def __init__(self, problem: Problem, optimizer: str, hyper: dict[str, Any]) -> None:
        self.problem = problem
        self.model = problem.model()
        self.optimizer = optimizers.get(optimizer).make(self.model, hyper)

    def train(self, watch: Stopwatch, name: str) -> None:
        """One training step: the times ``name.pass`` and ``name.step``."""
        with watch.time(f"{name}.pass"):
            self.optimizer.zero_grad()
            self.problem.loss(self.model).backward()
        with watch.time(f"{name}.step"):
            self.optimizer.step()


def plain_turn(contender: Contender, name: str) -> Turn:
    return lambda watch: contender.train(watch, name)


def refresh_turn(contender: Contender, name: str) -> Turn:
    """A step with a refresh and one without; for optimizers with ``update_every=2``, which begin with a refresh."""
    for _ in range(
        6 if isinstance(contender.optimizer, ngplus.NGAdam) else 0
    ):  # it refreshes in all of its first steps
        contender.train(Stopwatch(), name)

    def turn(watch: Stopwatch) -> None:
        contender.train(watch, f"{name}.refresh")
        contender.train(watch, f"{name}.plain")

    return turn


def measure_ngplus(setting: Setting, problem: Problem, more: dict[str, dict[str, Any]] | None = None) -> Taken:
    """SGD with momentum, NGPlus, and a second SGD, which shows what two equal things differ by."""
    turns: dict[str, Turn] = {}
    for name in ("sgd", "again"):
        turns[name] = plain_turn(Contender(problem, "sgd", FIRST_ORDER["sgd"]), name)
    for name, hyper in {"ngplus": {}, **(more or {})}.items():
        contender = Contender(problem, "ngplus", {**NGPLUS, **hyper, "update_every": 2})
        turns[name] = refresh_turn(contender, name)
    return Taken(take_turns(turns, setting.repeats, say=setting.say), {"problem": problem.title})


def resnet(setting: Setting) -> Taken:
    return measure_ngplus(setting, PROBLEMS["resnet"](setting.quick), QUARTER)


def transformer(setting: Setting) -> Taken:
    return measure_ngplus(setting, PROBLEMS["transformer"](setting.quick), QUARTER)


def mlp(setting: Setting) -> Taken:
    """Also with solver="dense": where a batch has fewer samples than a layer has rows, "auto" never forms L."""
    return measure_ngplus(setting, PROBLEMS["mlp"](setting.quick), {"dense": {"solver": "dense"}})


def ngadam_resnet(setting: Setting) -> Taken:
    return measure_ngadam(setting, "resnet")


def ngadam_transformer(setting: Setting) -> Taken:
    return measure_ngadam(setting, "transformer")


def ngadam_mlp(setting: Setting) -> Taken:
    return measure_ngadam(setting, "mlp")


def measure_ngadam(setting: Setting, name: str) -> Taken:
    """AdamW and NGAdam on the gradients of models of their own."""
    problem = PROBLEMS[name](setting.quick)
    turns: dict[str, Turn] = {
        "adamw": plain_turn(Contender(problem, "adamw", FIRST_ORDER["adamw"]), "adamw"),
        "ngadam": refresh_turn(Contender(problem, "ngadam", {**NGADAM, "update_every": 2}), "ngadam"),
    }
    return Taken(take_turns(turns, setting.repeats, say=setting.say), {"problem": problem.title})
