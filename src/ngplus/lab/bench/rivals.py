"""What people would take instead: the cost of a training step of each method, on the same models in the same run.

All methods that refresh something do so every T = 20 steps, NGAdam every 5. Those that do not capture share one forward
and backward pass of a round, since theirs are the same; NG+ and KFAC make their own, with and without the capture.
"""

from __future__ import annotations

from typing import Any

from ngplus.lab.bench.problems import PROBLEMS
from ngplus.lab.bench.record import Setting, Taken
from ngplus.lab.bench.state import bytes_by_name
from ngplus.lab.bench.timing import Stopwatch, Turn, take_turns
from ngplus.lab.bench.training import FIRST_ORDER, NGADAM, NGPLUS, Contender, refresh_turn

CAPTURING: dict[str, tuple[str, dict[str, Any]]] = {
    "ngplus": ("ngplus", NGPLUS),
    "ngadam": ("ngadam", NGADAM),
    "kfac": ("kfac", {"lr": 1e-5}),
}
# By the steps in which they refresh, where that is every second one: all but Shampoo in the odd ones.
SHAMPOO = {"lr": 1e-6, "preconditioning_compute_steps": 2, "start_preconditioning_step": 1}
REFRESHING: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "shampoo": ("shampoo", SHAMPOO, ("plain", "refresh")),
    "soap": ("soap", {"lr": 1e-6, "precondition_frequency": 2}, ("refresh", "plain")),
}
PLAIN: dict[str, dict[str, Any]] = {**FIRST_ORDER, "muon": {"lr": 1e-6}}


def resnet(setting: Setting) -> Taken:
    return measure(setting, "resnet")


def transformer(setting: Setting) -> Taken:
    return measure(setting, "transformer")


def mlp(setting: Setting) -> Taken:
    return measure(setting, "mlp")


def measure(setting: Setting, name: str) -> Taken:
    problem = PROBLEMS[name](setting.quick)
    base = Contender(problem, "sgd", FIRST_ORDER["sgd"])
    contenders: dict[str, Contender] = {}
    turns: dict[str, Turn] = {"base": lambda watch: base.train(watch, "base")}
    for method, hyper in PLAIN.items():
        contenders[method] = Contender(problem, method, hyper)
        turns[method] = _steps(contenders[method], base, [method])
    for method, (optimizer, hyper, kinds) in REFRESHING.items():
        contenders[method] = Contender(problem, optimizer, hyper)
        turns[method] = _steps(contenders[method], base, [f"{method}.{kind}" for kind in kinds])
    for method, (optimizer, hyper) in CAPTURING.items():
        contenders[method] = Contender(problem, optimizer, {**hyper, "update_every": 2})
        turns[method] = refresh_turn(contenders[method], method)
    times = take_turns(turns, setting.repeats, say=setting.say)
    states = {method: bytes_by_name(one.optimizer.state_dict()) for method, one in contenders.items()}
    gradients = sum(p.numel() * p.element_size() for p in base.model.parameters())
    return Taken(times, {"problem": problem.title, "states": states, "gradients": gradients})


def _steps(contender: Contender, base: Contender, names: list[str]) -> Turn:
    """Steps of the optimizer alone, on the gradients of the base's last pass."""

    def turn(watch: Stopwatch) -> None:
        for name in names:
            for own, other in zip(contender.model.parameters(), base.model.parameters(), strict=True):
                own.grad = None if other.grad is None else other.grad.clone()
            with watch.time(f"{name}.step"):
                contender.optimizer.step()

    return turn
