"""NG+ for PyTorch: natural gradient in matrix form. Public names; docs/architecture.md describes the folders."""

import importlib
from typing import TYPE_CHECKING, Any

from ngplus import layers, online, reference, schedules
from ngplus.capture.layers import register_layer
from ngplus.diagnostics.gfim import CurvatureDict, gfim
from ngplus.diagnostics.health import EigenvalueBounds, Health, HealthWarning, LayerHealth
from ngplus.diagnostics.plan import Plan, PlanRow
from ngplus.diagnostics.rank_costs import Load
from ngplus.optimizers.ngadam import NGAdam
from ngplus.optimizers.ngplus import NGPlus
from ngplus.optimizers.online import OnlineNGPlus
from ngplus.optimizers.preconditioner import Preconditioner
from ngplus.preconditioners.ngplus_curvature import Curvature

if TYPE_CHECKING:
    from ngplus import baselines

__version__ = "0.1.0.dev0"

__all__ = [
    "Curvature",
    "CurvatureDict",
    "EigenvalueBounds",
    "Health",
    "HealthWarning",
    "LayerHealth",
    "Load",
    "NGAdam",
    "NGPlus",
    "OnlineNGPlus",
    "Plan",
    "PlanRow",
    "Preconditioner",
    "baselines",
    "gfim",
    "layers",
    "online",
    "reference",
    "register_layer",
    "schedules",
]


def __getattr__(name: str) -> Any:
    """Imports the baselines on first use."""
    if name == "baselines":
        return importlib.import_module("ngplus.baselines")
    raise AttributeError(f"module 'ngplus' has no attribute {name!r}")
