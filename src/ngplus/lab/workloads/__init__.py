"""The workloads by name. Their modules are imported when asked for, since each brings libraries of its own."""

from __future__ import annotations

import importlib

from ngplus.lab.optimizers import check_name
from ngplus.lab.workloads.base import DataError, Preset, Task, Workload

# name: module and class
_WORKLOADS: dict[str, tuple[str, str]] = {
    "digits": ("digits", "Digits"),
    "autoencoder": ("autoencoder", "Autoencoder"),
    "cifar10": ("cifar10", "Cifar10"),
    "imagenet": ("imagenet", "ImageNet"),
    "qm9": ("qm9", "QM9"),
    "materials": ("materials", "Materials"),
    "multi30k": ("multi30k", "Multi30k"),
    "iwslt14": ("iwslt14", "Iwslt14"),
    "criteo": ("criteo", "Criteo"),
    "shakespeare": ("shakespeare", "Shakespeare"),
    "sst2": ("sst2", "Sst2"),
}


def names() -> list[str]:
    return list(_WORKLOADS)


def get(name: str) -> Workload:
    """The workload of that name, or of ``module:Class``; an unknown one is refused with the nearest name."""
    if ":" in name:
        return _own(name)
    check_name(name, _WORKLOADS, "workload")
    module, cls = _WORKLOADS[name]
    workload: Workload = getattr(importlib.import_module(f"ngplus.lab.workloads.{module}"), cls)()
    return workload


def _own(where: str) -> Workload:
    """Somebody's own workload; ValueError where it is not there or lacks something."""
    module, _, name = where.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{where!r} cannot be imported: {error}. For modules in the working folder, set PYTHONPATH=."
        ) from error
    except TypeError as error:  # a method that is missing, or an argument that nobody gives
        raise ValueError(f"{where!r} cannot be created: {error}") from error
    if not isinstance(made, Workload):
        raise ValueError(f"{where!r} must be a Workload of ngplus.lab.workloads, not {type(made).__name__}")
    for part in ("name", "title", "measure", "higher_is_better", "presets"):
        if not hasattr(made, part):
            raise ValueError(f"{where!r} has no {part!r}: see the example in docs/laboratory.md")
    if made.name in _WORKLOADS:  # it would get that one's tuned settings
        raise ValueError(f"{where!r} has the name of a workload of ngplus, {made.name!r}: give it another")
    return made


__all__ = ["DataError", "Preset", "Task", "Workload", "get", "names"]
