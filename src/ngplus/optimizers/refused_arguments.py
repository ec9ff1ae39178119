"""Arguments of other optimizers that NGPlus and NGAdam do not have: the error names what to use in place of each.

They are not in the signatures, by which trainers choose the arguments to pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec

P = ParamSpec("P")


class Refused(NamedTuple):
    """What to use in place of an argument, and the values that ask for nothing else than what is done."""

    instead: str
    accepted: tuple[Any, ...] = ()


# Arguments of torch.optim that choose between implementations of the same step.
IMPLEMENTATIONS = {
    "foreach": Refused("leave it out, there is one implementation, with torch's foreach functions", (None, True)),
    "fused": Refused("leave it out, there is no fused kernel", (None, False)),
    "capturable": Refused("leave it out, the step is not made for CUDA graphs", (False,)),
    "differentiable": Refused("leave it out, gradients do not pass through the step", (False,)),
}

OF_NGADAM = {
    **IMPLEMENTATIONS,
    "amsgrad": Refused("leave it out, L and R are moving averages", (False,)),
    "momentum": Refused("betas=(momentum, 0.95) sets it"),
    "dampening": Refused("leave it out, betas[0] is the decay of a moving average"),
    "nesterov": Refused("leave it out, the momentum is always Nesterov's", (True,)),
    "decoupled_weight_decay": Refused("leave it out, weight_decay is always decoupled", (True,)),
    "damping": Refused("leave it out, lambda is fixed; NGPlus takes it"),
    "curvature": Refused("leave it out, L and R come from mini-batch gradients; NGPlus takes it"),
}

OF_NGPLUS = {
    **IMPLEMENTATIONS,
    "betas": Refused("momentum= and beta= (of the curvature) are its decays; NGAdam takes betas"),
    "eps": Refused("damping= or relative_damping= is added to the curvature; NGAdam takes eps"),
    "amsgrad": Refused("leave it out, beta= is the decay of the curvature", (False,)),
    "dampening": Refused("leave it out, the momentum is that of torch.optim.SGD without dampening", (0,)),
    "decoupled_weight_decay": Refused("weight_decay is that of torch.optim.SGD; NGAdam's is decoupled", (False,)),
}


def refuses(table: Mapping[str, Refused]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates ``__init__``: for an argument in the table, raises a TypeError that names what to use, unless its value
    is accepted. The signature stays as it is."""

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(init)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            for name in table.keys() & kwargs.keys():
                value = kwargs.pop(name)
                if not any(value is known or value == known for known in table[name].accepted):
                    raise TypeError(f"{type(args[0]).__name__} has no argument {name!r}: {table[name].instead}")
            init(*args, **kwargs)

        checked.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
        return checked

    return decorate
