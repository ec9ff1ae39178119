"""Checks of the options of a parameter group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ngplus.fisher.sketch import SketchSpec
from ngplus.utils.validation import choice, number, whole

CHOICES = {
    "curvature": ("sample", "momentum", "batch"),
    "side": ("smaller", "left", "right"),
    "solver": ("auto", "dense", "woodbury", "sketched"),
    "loss_reduction": ("mean", "sum"),
    "graft": (None, "sgd", "adam"),
}


def check_learning_rate(options: Mapping[str, Any]) -> None:
    """Checks the options that all optimizers have: lr, weight_decay, maximize, update_every."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    number("learning rate", lr)
    number("weight_decay", options["weight_decay"])
    whole("update_every", options["update_every"])
    _boolean("maximize", options["maximize"])


def check_momentum(options: Mapping[str, Any]) -> None:
    """Checks the options of torch.optim.SGD, and loss_reduction."""
    check_learning_rate(options)
    number("momentum", options["momentum"])
    _boolean("nesterov", options["nesterov"])
    if options["nesterov"] and not options["momentum"] > 0:
        raise ValueError(f"nesterov=True requires a momentum above 0, and momentum={options['momentum']}")
    choice("loss_reduction", options["loss_reduction"], CHOICES["loss_reduction"])


def check_samples(options: Mapping[str, Any]) -> None:
    """Checks samples and seed."""
    whole("seed", options["seed"], least=None)
    samples = options["samples"]
    if isinstance(samples, float):
        if not 0.0 < samples <= 1.0:
            raise ValueError(f"Invalid samples: {samples} (a fraction in (0, 1], or a whole number of samples)")
    elif samples is not None:
        whole("samples", samples)


def check(options: Mapping[str, Any]) -> None:
    """Checks the options of NGPlus. Raises ValueError, with the name and the value, for the first invalid one."""
    check_momentum(options)
    number("damping", options["damping"])
    number("relative_damping", options["relative_damping"])
    number("beta", options["beta"], top=1.0)
    number("gamma", options["gamma"])
    if options["block_size"] is not None:
        whole("block_size", options["block_size"])
    check_samples(options)
    whole("refresh_memory", options["refresh_memory"])
    for name, values in CHOICES.items():
        choice(name, options[name], values)
    SketchSpec.parse(options["sketch"])
    solver = options["solver"]
    if solver in ("woodbury", "sketched"):
        if options["curvature"] != "sample":
            raise ValueError(f"solver={solver!r} requires curvature='sample': a moving average is not of low rank")
        if solver == "woodbury" and options["sketch"] is not None:
            raise ValueError(
                "solver='woodbury' does not take a sketch: use solver='sketched', or solver='dense' with a sketch"
            )
        if options["damping"] == 0 and options["relative_damping"] == 0:
            raise ValueError(
                f"solver={solver!r} divides by lambda, and damping and relative_damping are 0: use solver='dense'"
            )


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"Invalid {name}: {value!r} (True or False)")
