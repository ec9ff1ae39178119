"""NG+ for PyTorch: natural gradient in matrix form. Public names; docs/architecture.md describes the folders.

A name is imported when it is first used, so that the command line does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngplus import baselines, layers, online, reference, schedules
    from ngplus.capture.layers import register_layer
    from ngplus.diagnostics.gfim import CurvatureDict, gfim
    from ngplus.diagnostics.health import EigenvalueBounds, Health, HealthWarning, LayerHealth
    from ngplus.diagnostics.plan import Plan, PlanRow
    from ngplus.diagnostics.rank_costs import Load
    from ngplus.optimizers.ngadam import NGAdam
    from ngplus.optimizers.ngplus import NGPlus
    from ngplus.optimizers.online import OnlineNGPlus
    from ngplus.optimizers.param_groups import decay_groups
    from ngplus.optimizers.preconditioner import Preconditioner
    from ngplus.preconditioners.ngplus_curvature import Curvature

__version__ = "0.1.0.dev0"

_MODULES = ("baselines", "layers", "online", "reference", "schedules")
_DEFINED_IN = {
    "Curvature": "preconditioners.ngplus_curvature",
    "CurvatureDict": "diagnostics.gfim",
    "EigenvalueBounds": "diagnostics.health",
    "Health": "diagnostics.health",
    "HealthWarning": "diagnostics.health",
    "LayerHealth": "diagnostics.health",
    "Load": "diagnostics.rank_costs",
    "NGAdam": "optimizers.ngadam",
    "NGPlus": "optimizers.ngplus",
    "OnlineNGPlus": "optimizers.online",
    "Plan": "diagnostics.plan",
    "PlanRow": "diagnostics.plan",
    "Preconditioner": "optimizers.preconditioner",
    "decay_groups": "optimizers.param_groups",
    "gfim": "diagnostics.gfim",
    "register_layer": "capture.layers",
}

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
    "decay_groups",
    "gfim",
    "layers",
    "online",
    "reference",
    "register_layer",
    "schedules",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ngplus.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'ngplus' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"ngplus.{_DEFINED_IN[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
