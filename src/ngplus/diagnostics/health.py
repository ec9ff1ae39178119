"""``opt.health()``: the faults that were handled, counted by layer, with one warning for each layer.

Counts on an accelerator stay there. They are copied to the host asynchronously, every :data:`FETCH_EVERY` steps and at
each refresh; :meth:`FaultCounter.health` waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ngplus.diagnostics.tables import aligned
from ngplus.utils.compiled import uncompiled
from ngplus.utils.finite import copy_to_host, read_if_on_host
from ngplus.utils.warnings import warn

FETCH_EVERY = 100
SHOWN = 5  # names in a warning

# The kinds of faults of a layer, in the order of a step, and their warnings.
FAULTS = {
    "gradients": "Gradients that are not finite, or too large for their norm: {}. "
    "The step was skipped, and no parameter was changed. The cause lies in the model, its data or the learning rate",
    "dropped": "The curvature of {} is not finite. The last finite one is used, or the plain gradient if there is none",
    "retried": "The curvature of {} did not factorise at once. NGPlus tries more damping and then float64, which a "
    "larger damping avoids; NGAdam takes float64, and nothing has to be done",
    "plain": "The curvature of {} does not factorise. NGPlus makes the plain gradient step in its place, and a larger "
    "damping may help; NGAdam takes the root of its diagonal until the next refresh",
    "steps": "The step of {} is not finite or too large; it is skipped, and its momentum is reset. "
    "A smaller learning rate may help",
}


class HealthWarning(UserWarning):
    """A fault that the optimizer has handled. To stop instead, turn the warning into an error.

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
    """The faults of a layer: the number of steps or refreshes of each kind.

    Attributes:
        name: of the parameter.
        gradients: steps skipped because of its gradient.
        dropped: refreshes dropped, since the curvature was not finite.
        retried: refreshes that needed a second attempt: more damping (NGPlus), or float64.
        plain: refreshes that ended without an inverse or root: the plain gradient step, or the root of the diagonal.
        steps: steps of this layer alone that were skipped.

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
class EigenvalueBounds:
    r"""The smallest and largest eigenvalue of $\lambda I + L$ (or R) of a layer.

    They are $h_1$ and $h_2$ of the paper's Assumption 1.

    Attributes:
        name: of the parameter.
        h1: the smallest eigenvalue; a step is at most $\alpha / h_1$ times the gradient.
        h2: the largest eigenvalue.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = ngplus.NGPlus(model, damping=0.5)
        >>> model(torch.randn(8, 3)).square().mean().backward()
        >>> optimizer.step()
        >>> (bounds,) = optimizer.health(eigenvalues=True).eigenvalues
        >>> bounds.name, 0.5 <= bounds.h1 <= bounds.h2
        ('weight', True)
    """

    name: str
    h1: float
    h2: float


@dataclass(frozen=True)
class Health:
    r"""The counts since the optimizer was made, and the layers that had faults; ``print(health)`` shows a table.

    Attributes:
        steps: calls of ``step`` that had gradients.
        skipped: those of them that were skipped, since gradients were not finite.
        layers: the layers that had faults.
        eigenvalues: the bounds on the eigenvalues of each layer's $\lambda I + L$, where they were asked for.

    Examples:
        >>> optimizer = ngplus.NGPlus(nn.Linear(3, 2))
        >>> print(optimizer.health())
        0 steps, 0 skipped; no layer had a fault
    """

    steps: int
    skipped: int
    layers: tuple[LayerHealth, ...]
    eigenvalues: tuple[EigenvalueBounds, ...] = ()

    @property
    def good(self) -> bool:
        """Whether there was no fault. Overflows of a GradScaler do not count: it does not call ``step``."""
        return not self.skipped and not self.layers

    def __getitem__(self, name: str) -> LayerHealth:
        """The layer of that name; zeros for one without faults."""
        return next((layer for layer in self.layers if layer.name == name), LayerHealth(name))

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain dicts, for a log."""
        return asdict(self)

    def __str__(self) -> str:
        first = f"{self.steps} steps, {self.skipped} skipped"
        counts = [(layer.name, *(str(getattr(layer, fault)) for fault in FAULTS)) for layer in self.layers]
        bounds = [(b.name, f"{b.h1:.3g}", f"{b.h2:.3g}", f"{b.h2 / b.h1:.3g}") for b in self.eigenvalues]
        shown = [first if self.layers else f"{first}; no layer had a fault"]
        for heads, rows in ((("layer", *FAULTS), counts), (("layer", "h_1", "h_2", "h_2 / h_1"), bounds)):
            if rows:
                lines = aligned([heads, *rows])
                shown += [lines[0], "-" * len(lines[0]), *lines[1:]]
        return "\n".join(shown)


class FaultCounter:
    """Counts faults by kind and name, on the device where they are found."""

    def __init__(self) -> None:
        self.steps = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._new: dict[str, list[str]] = {}
        self._on_device: dict[tuple[str, tuple[str, ...]], Tensor] = {}  # counts that are not copied yet
        self._copies: list[tuple[str, tuple[str, ...], Tensor, Any]] = []  # copies to the host, with their events
        self._failing: set[str] = set()

    def note(self, kind: str, names: Sequence[str], flags: Tensor) -> None:
        """Counts the names whose flag, [n], is set."""
        if torch.compiler.is_compiling():
            uncompiled()(self.note, kind, names, flags)
            return
        seen = read_if_on_host(flags)
        if seen is None:
            key = (kind, tuple(names))
            counts = self._on_device.get(key)
            self._on_device[key] = flags.to(torch.int32) if counts is None else counts + flags
        elif any(seen):
            for name, flag in zip(names, seen, strict=True):
                self._count(kind, name, int(flag))

    def _count(self, kind: str, name: str, times: int) -> None:
        if not times:
            return
        entry = (kind, name)
        self._counts[entry] += times
        if kind in FAULTS and entry not in self._warned:
            self._warned.add(entry)
            self._new.setdefault(kind, []).append(name)
        if kind == "retried":
            self._failing.add(name)

    def needs_help(self, name: str) -> bool:
        """Whether the last factorization that the host knows of failed. Resets the answer."""
        failing = name in self._failing
        self._failing.discard(name)
        return failing

    def fetch(self) -> None:
        """Counts what has been copied to the host, and starts copying the rest. Does not wait."""
        pending = []
        for entry in self._copies:
            kind, names, counts, event = entry
            if event is not None and not event.query():
                pending.append(entry)
                continue
            for name, times in zip(names, counts.tolist(), strict=True):
                self._count(kind, name, times)
        self._copies = pending
        for (kind, names), counts in self._on_device.items():
            self._copies.append((kind, names, *copy_to_host(counts)))
        self._on_device.clear()

    def emit_warnings(self) -> None:
        """Emits one warning for each kind, with the names of the layers that it has not named before."""
        new, self._new = self._new, {}
        for kind, names in new.items():
            shown = f"{', '.join(names[:SHOWN])}{' and more' if len(names) > SHOWN else ''}"
            warn(
                f"{FAULTS[kind].format(shown)}. health() has the counts; this warning appears once for each layer",
                HealthWarning,
            )

    def health(self) -> Health:
        """All counts; waits for the devices."""
        self.fetch()
        for _, _, _, event in self._copies:
            if event is not None:
                event.synchronize()
        self.fetch()
        names = dict.fromkeys(name for kind, name in self._counts if kind in FAULTS)
        layers = tuple(LayerHealth(n, **{kind: self._counts[kind, n] for kind in FAULTS}) for n in names)
        return Health(self.steps, self._counts["skipped", ""], layers)
