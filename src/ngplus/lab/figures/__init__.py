"""The paper's theory as experiments: each module has ``compute``, ``draw`` and ``summary``.

``compute(seed, small)`` gives the numbers, ``draw(outcome)`` the picture, ``summary(outcome)`` a short table. The
modules are imported when asked for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from ngplus.lab.figures.common import FigureError, Outcome, conditions, save

# name: what it shows
FIGURES: dict[str, str] = {
    "gfim": "the GFIM beside the EFIM: where the approximation holds and where it stops",
    "convergence": "Theorems 2 and 3: gradient norms, bounds and rates; what happens outside of the assumptions",
    "regret": "Theorem 5: logarithmic regret of OnlineNGPlus, and which dimension the bound carries",
    "costs": "sections 2.4 and 2.5: FLOPs, bytes of state and on the wire of NG+, KFAC, Shampoo and SENG",
    "sketch": "error of the sketched product and of sketched least squares against q",
    "blocks": "direction error and cost of the block-diagonal form against p",
    "steps": "loss reached against T, the multi-step trade-off",
}


def module(name: str) -> ModuleType:
    return importlib.import_module(f"ngplus.lab.figures.{name}")


def make(name: str, out: Path, seed: int, small: bool, **options: str) -> tuple[Outcome, list[Path]]:
    """Computes a figure and writes NAME.png, NAME.svg and NAME.json into ``out``."""
    figure = module(name)
    with conditions():
        outcome: Outcome = figure.compute(seed=seed, small=small, **options)
        return outcome, save(name, figure.draw(outcome), outcome, out)


__all__ = ["FIGURES", "FigureError", "Outcome", "make", "module"]
