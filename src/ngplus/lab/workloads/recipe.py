"""The paper's settings of an optimizer on a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """``hyper`` for the optimizer; ``run`` for what a recipe has of its own: steps, schedule, warmup, damping_decay
    (what is left of the damping at the end). Plain values, in the form of the tuned presets."""

    hyper: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)
