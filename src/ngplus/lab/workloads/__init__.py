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
}


def names() -> list[str]:
    return list(_WORKLOADS)


def get(name: str) -> Workload:
    """The workload of that name; an unknown one is refused with the nearest name."""
    check_name(name, _WORKLOADS, "workload")
    module, cls = _WORKLOADS[name]
    workload: Workload = getattr(importlib.import_module(f"ngplus.lab.workloads.{module}"), cls)()
    return workload


__all__ = ["DataError", "Preset", "Task", "Workload", "get", "names"]
