"""The options of a parameter group: their defaults are in :class:`ngplus.NGPlus`, their checks are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ngplus.fisher.sketch import SketchSpec
from ngplus.utils.validation import choice, number, whole

CHOICES = {
    "curvature": ("sample", "momentum", "batch"),
    "scaling": ("inverse", "adaptive"),
    "side": ("auto", "smaller", "left", "right", "both"),
    "solver": ("auto", "dense", "woodbury", "sketched"),
    "damping_mode": ("absolute", "relative"),
    "loss_reduction": ("mean", "sum"),
    "second_moment": ("factored", "full"),
    "graft": (None, "sgd", "adam"),
}


def resolve_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for the options that were left open, by the scaling and by one another.

    "inverse" is the paper's: L of the last refresh, refreshes T steps apart. "adaptive" is the best of
    docs/ablations.md: a moving average of L and R, early refreshes, Nesterov's look ahead. ``side="auto"`` stays open,
    and goes by the scaling, too (:meth:`ngplus.capture.matrices.ParameterMatrix.partition_of`).
    """
    adaptive = options["scaling"] == "adaptive"
    curvature = options["curvature"]
    if curvature is None:
        curvature = "momentum" if adaptive else "sample"
    values = {
        "curvature": curvature,
        "beta": (0.95 if curvature == "batch" else 0.5) if adaptive else 0.9,
        "nesterov": bool(adaptive and options["momentum"]),
        "early_refreshes": adaptive,
    }
    return {name: value for name, value in values.items() if options[name] is None}


def check(options: Mapping[str, Any]) -> None:
    """Raises ValueError, with the name and the value, for the first option that does not make sense."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    number("learning rate", lr)
    number("momentum", options["momentum"])
    number("weight_decay", options["weight_decay"])
    if options["damping"] != "auto":
        number("damping", options["damping"], hint=' (a number of 0 or more, or "auto")')
    number("beta", options["beta"], top=1.0)
    number("beta2", options["beta2"], top=1.0, open_top=True)
    number("eps", options["eps"])
    if options["gamma"] is not None:
        number("gamma", options["gamma"])
    for name in ("update_every", "block_size"):
        if name == "block_size" and options[name] is None:
            continue
        whole(name, options[name])
    whole("seed", options["seed"], least=None)
    for name in ("nesterov", "early_refreshes", "decoupled_weight_decay", "maximize"):
        if not isinstance(options[name], bool):
            raise ValueError(f"Invalid {name}: {options[name]!r} (True or False)")
    samples = options["samples"]
    if isinstance(samples, float):
        if not 0.0 < samples <= 1.0:
            raise ValueError(f"Invalid samples: {samples} (a fraction in (0, 1], or a whole number of samples)")
    elif samples is not None:
        whole("samples", samples)
    for name in CHOICES:
        choice(name, options[name], CHOICES[name])
    SketchSpec.parse(options["sketch"])
    if options["nesterov"] and not options["momentum"] > 0:
        raise ValueError(
            f"nesterov=True looks ahead along the momentum, which is {options['momentum']}: take a momentum above 0, "
            "or nesterov=False"
        )
    if options["scaling"] == "adaptive" and not options["momentum"] < 1:
        raise ValueError(f"Invalid momentum: {options['momentum']} (below 1 with scaling='adaptive')")
    if options["side"] == "both":
        if options["scaling"] != "adaptive":
            raise ValueError("side='both' goes with scaling='adaptive': the paper's inverse has one side")
        if options["block_size"] is not None or options["sketch"] is not None:
            raise ValueError("side='both' goes without block_size and sketch, which shorten one side")
    if options["solver"] in ("woodbury", "sketched"):
        if options["scaling"] != "inverse":
            raise ValueError(f"solver={options['solver']!r} goes with scaling='inverse', not with an eigenbasis")
        if options["curvature"] != "sample":
            raise ValueError(
                f"solver={options['solver']!r} goes with curvature='sample': a moving average is not of low rank"
            )
        if options["solver"] == "woodbury" and options["sketch"] is not None:
            raise ValueError(
                "solver='woodbury' is exact, and takes no sketch: take solver='sketched', or 'dense' with a sketch"
            )
        if options["damping"] == 0:
            raise ValueError(f"solver={options['solver']!r} divides by the damping, which is 0: take solver='dense'")


def without_effect(given: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """In words, the options that differ from the usual ones and change nothing beside the others; empty for none."""
    adaptive = given["scaling"] == "adaptive"
    curvature = {**given, **resolve_defaults(given)}["curvature"]
    idle: set[str] = set()
    if curvature != "batch":
        idle |= {"gamma"} | ({"damping", "damping_mode"} if adaptive else set())
    if curvature == "sample":
        idle.add("beta")
    if adaptive:
        idle.add("solver")
    else:
        idle |= {"second_moment"} | (set() if given["graft"] == "adam" else {"beta2", "eps"})
    named = [name for name in usual if name in idle and given[name] is not usual[name] and given[name] != usual[name]]
    beside = f"scaling={given['scaling']!r} and curvature={curvature!r}"
    return f"{', '.join(named)} {'changes' if len(named) == 1 else 'change'} nothing with {beside}" if named else ""
