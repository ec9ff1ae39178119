"""Refreshes by drift: layers whose curvature stands still are refreshed less often."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import Distributor
from ngplus.preconditioners import sharing
from ngplus.utils.typing import Group, State

LONGEST = 16  # no layer waits longer than this many times T


class Drifting:
    """How far the curvature of each matrix had moved at the refresh of this step, and what follows from that."""

    def __init__(self) -> None:
        self._moved: dict[int, Tensor] = {}

    def note(self, matrix: ParameterMatrix, moved: Tensor) -> None:
        """What ``curvature.drift`` has found; nobody waits for the number before the step is done."""
        self._moved[id(matrix)] = moved

    def schedule(
        self, due: Sequence[tuple[ParameterMatrix, Group, State | None]], distributors: Sequence[Distributor]
    ) -> None:
        """The matrices that were due: one whose curvature moved less (or more) than ``drift`` since its last refresh
        waits up to twice as long (or half as long) for the next one; never less than T steps, never more than 16 T."""
        moved = [id(matrix) for matrix, _, _ in due if id(matrix) in self._moved]
        values = torch.stack([self._moved[key] for key in moved]).tolist() if moved else []
        by_matrix = dict(zip(moved, values, strict=True))
        for distributor in distributors:  # what only the owner knows
            own = {id(matrix) for matrix in distributor.matrices}
            sharing.tell_all(
                distributor, [m for m, _, _ in due if id(m) in own and distributor.is_remote(m)], by_matrix
            )
        for matrix, group, state in due:
            if not state:
                continue
            shortest = group["update_every"]
            interval = state.get("refresh_interval", shortest)
            if id(matrix) in by_matrix:
                factor = min(2.0, max(0.5, group["drift"] / max(by_matrix[id(matrix)], 1e-12)))
                interval = round(interval * factor)
            interval = min(max(interval, shortest), LONGEST * shortest)
            state.update(refresh_interval=interval, refresh_at=group["step"] + interval)
        self._moved.clear()
