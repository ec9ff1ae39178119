"""NG+ for PyTorch: natural gradient in matrix form. Here are the public names; docs/architecture.md has the rooms.

On the way from gradient to step: the door to it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ngplus import layers, online, schedules
from ngplus.health import Health, HealthWarning, LayerHealth
from ngplus.layers import register_layer
from ngplus.loads import Load
from ngplus.online import OnlineNGPlus
from ngplus.optimizer import Curvature, NGPlus
from ngplus.plan import Plan, PlanRow
from ngplus.preconditioner import Preconditioner
from ngplus.study import gfim

if TYPE_CHECKING:
    from ngplus import baselines

__version__ = "0.1.0.dev0"

__all__ = [
    "Curvature",
    "Health",
    "HealthWarning",
    "LayerHealth",
    "Load",
    "NGPlus",
    "OnlineNGPlus",
    "Plan",
    "PlanRow",
    "Preconditioner",
    "baselines",
    "gfim",
    "layers",
    "online",
    "register_layer",
    "schedules",
]


def __getattr__(name: str) -> Any:
    """The rivals are imported when they are asked for."""
    if name == "baselines":
        return importlib.import_module("ngplus.baselines")
    raise AttributeError(f"module 'ngplus' has no attribute {name!r}")
