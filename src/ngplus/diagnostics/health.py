"""``opt.health()``: what went wrong and was put right, counted by layer, told once.

The counts of what happens on an accelerator stay there. They are fetched in the background every :data:`FETCH_EVERY`
steps and at each refresh, and at once where :meth:`Ledger.health` asks for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ngplus.utils.compiled import uncompiled
from ngplus.utils.finite import read_if_on_host
from ngplus.utils.warnings import warn

FETCH_EVERY = 100
SHOWN = 5  # names in a warning

# Kinds of faults that have a layer, in the order of a step, and what the warning says.
FAULTS = {
    "gradients": "Gradients that are not finite, or too large for their norm: {}. "
    "The step was skipped, and no parameter was changed. The cause lies in the model, its data or the learning rate",
    "dropped": "The curvature of {} is not finite; the last good one stays in use, "
    "or the plain gradient where there is none",
    "retried": "The curvature of {} did not factorise at once. NGPlus gives it more damping, and then float64, and a "
    "larger damping spares this; NGAdam takes float64, and nothing is to be done",
    "plain": "The curvature of {} does not factorise. NGPlus makes the plain gradient step in its place, and a larger "
    "damping may help; NGAdam takes the root of its diagonal until the next refresh",
    "steps": "The step of {} is not finite or too large; it is left out, and its momentum begins anew. "
    "A smaller learning rate may help",
}


class HealthWarning(UserWarning):
    """A fault that was put right. To stop instead, make it an error.

    Examples:
        >>> import warnings
        >>> model = nn.Linear(3, 2)
        >>> optimizer = ngplus.NGPlus(model)
        >>> model(torch.full((4, 3), float("nan"))).sum().backward()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", ngplus.HealthWarning)
        ...     try:
        ...         optimizer.step()
        ...     except ngplus.HealthWarning as fault:
        ...         print(str(fault)[:29])
        Gradients that are not finite
    """


@dataclass(frozen=True)
class LayerHealth:
    """A layer that had faults, by its parameter's name: how many steps or refreshes of each kind.

    Attributes:
        name: of the parameter.
        gradients: steps skipped because of its gradient.
        dropped: refreshes dropped, since the curvature was not finite.
        retried: refreshes that needed another attempt: more damping (NGPlus), or float64.
        plain: refreshes that ended without an inverse or root: the plain gradient step, or the root of the diagonal.
        steps: steps of this layer alone that were left out.

    Examples:
        >>> optimizer = ngplus.NGPlus(nn.Linear(3, 2))
        >>> optimizer.health()["weight"].dropped
        0
    """

    name: str
    gradients: int = 0
    dropped: int = 0
    retried: int = 0
    plain: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Health:
    """The counts since the optimizer was made, and the layers that had faults; ``print(health)`` shows a table.

    Attributes:
        steps: calls of ``step`` that had gradients.
        skipped: those of them that were skipped, since gradients were not finite.
        layers: the layers that had faults.

    Examples:
        >>> optimizer = ngplus.NGPlus(nn.Linear(3, 2))
        >>> print(optimizer.health())
        0 steps, 0 skipped; no layer had a fault
    """

    steps: int
    skipped: int
    layers: tuple[LayerHealth, ...]

    @property
    def good(self) -> bool:
        """Nothing was put right. A GradScaler's overflows are its own: it does not call the step."""
        return not self.skipped and not self.layers

    def __getitem__(self, name: str) -> LayerHealth:
        """The layer of that name; zeros for one without faults."""
        return next((layer for layer in self.layers if layer.name == name), LayerHealth(name))

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain dicts, for a log."""
        return asdict(self)

    def __str__(self) -> str:
        first = f"{self.steps} steps, {self.skipped} skipped"
        if not self.layers:
            return f"{first}; no layer had a fault"
        table = [
            ("layer", *FAULTS),
            *((layer.name, *(str(getattr(layer, f)) for f in FAULTS)) for layer in self.layers),
        ]
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([first, lines[0], "-" * len(lines[0]), *lines[1:]])


class FaultCounter:
    """Counts faults by kind and name, on whatever device they are found."""

    def __init__(self) -> None:
        self.steps = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._told: set[tuple[str, str]] = set()
        self._untold: dict[str, list[str]] = {}
        self._waiting: dict[tuple[str, tuple[str, ...]], Tensor] = {}  # counts that are still on a device
        self._sent: list[tuple[str, tuple[str, ...], Tensor, Any]] = []  # on their way to the host
        self._failing: set[str] = set()

    def note(self, kind: str, names: Sequence[str], flags: Tensor) -> None:
        """Counts the names whose flag, [n], is set."""
        if torch.compiler.is_compiling():
            uncompiled()(self.note, kind, names, flags)
            return
        seen = read_if_on_host(flags)
        if seen is None:
            key = (kind, tuple(names))
            held = self._waiting.get(key)
            self._waiting[key] = flags.to(torch.int32) if held is None else held + flags
        elif any(seen):
            for name, flag in zip(names, seen, strict=True):
                self._count(kind, name, int(flag))

    def _count(self, kind: str, name: str, times: int) -> None:
        if not times:
            return
        entry = (kind, name)
        self._counts[entry] += times
        if kind in FAULTS and entry not in self._told:
            self._told.add(entry)
            self._untold.setdefault(kind, []).append(name)
        if kind == "retried":
            self._failing.add(name)

    def needs_help(self, name: str) -> bool:
        """Did the last factorization that the host knows of fail? Asked once: the next failure says so again."""
        failing = name in self._failing
        self._failing.discard(name)
        return failing

    def fetch(self) -> None:
        """Takes in what has arrived from the devices, and sends for the rest; waits for nothing."""
        under_way = []
        for entry in self._sent:
            kind, names, counts, event = entry
            if event is not None and not event.query():
                under_way.append(entry)
                continue
            for name, times in zip(names, counts.tolist(), strict=True):
                self._count(kind, name, times)
        self._sent = under_way
        for (kind, names), counts in self._waiting.items():
            self._sent.append((kind, names, *_on_its_way(counts)))
        self._waiting.clear()

    def tell(self) -> None:
        """One warning for each kind, with the names of the layers that have not been named for it before."""
        untold, self._untold = self._untold, {}
        for kind, names in untold.items():
            shown = f"{', '.join(names[:SHOWN])}{' and more' if len(names) > SHOWN else ''}"
            warn(f"{FAULTS[kind].format(shown)}. health() counts; told once for each layer", HealthWarning)

    def health(self) -> Health:
        """All counts, waiting for the devices."""
        self.fetch()
        for _, _, _, event in self._sent:
            if event is not None:
                event.synchronize()
        self.fetch()
        names = dict.fromkeys(name for kind, name in self._counts if kind in FAULTS)
        layers = tuple(LayerHealth(n, **{kind: self._counts[kind, n] for kind in FAULTS}) for n in names)
        return Health(self.steps, self._counts["skipped", ""], layers)


def _on_its_way(counts: Tensor) -> tuple[Tensor, Any]:
    """A copy for the host, and the event after which it is there; memory that is not pinned would make it wait."""
    if counts.is_cpu:
        return counts, None
    copy = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
    event = torch.Event(counts.device)
    event.record()
    return copy, event
