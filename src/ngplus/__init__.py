"""NG+ for PyTorch: natural gradient in matrix form, second-order steps at the price of SGD."""

from ngplus import baselines, layers, schedules
from ngplus.layers import register_layer
from ngplus.online import OnlineNGPlus
from ngplus.optimizer import Curvature, NGPlus
from ngplus.plan import Plan, PlanRow
from ngplus.preconditioner import Preconditioner
from ngplus.study import gfim

__version__ = "0.1.0.dev0"

__all__ = [
    "Curvature",
    "NGPlus",
    "OnlineNGPlus",
    "Plan",
    "PlanRow",
    "Preconditioner",
    "baselines",
    "gfim",
    "layers",
    "register_layer",
    "schedules",
]
