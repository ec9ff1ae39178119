"""``optimizer.health()``: counts of the faults that were handled, with one warning for each layer.

Counts on an accelerator stay there. They are copied to the host asynchronously, every :data:`FETCH_EVERY` steps and at
each refresh; :meth:`FaultCounter.health` waits for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ngplus.diagnostics.tables import legend, within_width
from ngplus.utils.compiled import uncompiled
from ngplus.utils.finite import copy_to_host, norms_of, read_if_on_host
from ngplus.utils.warnings import warn

FETCH_EVERY = 100
SHOWN = 5  # names in a warning

# The kinds of faults of a layer, in the order of a step, and their warnings.
FAULTS = {
    "gradients": "Gradients that are not finite, or whose norm overflows: {}. "
    "The step was skipped, and no parameter changed. Check the data, the model and the learning rate",
    "dropped": "The curvature of {} is not finite. The last finite one is used, or the plain gradient if there is none",
    "retried": "The curvature of {} could not be factorised at the first attempt. More damping is tried, then float64. "
    "A larger damping avoids this",
    "plain": "The curvature of {} could not be factorised. NGPlus uses the plain gradient: a larger damping may help. "
    "NGAdam uses the root of the diagonal until the next refresh",
    "steps": "The step of {} was not finite or too large. It was skipped, and its momentum in NGPlus was reset. "
    "A smaller learning rate may help",
}


# The columns of the printed tables.
LEGEND = (
    "gradients: steps skipped for gradients that are not finite",
    "dropped: refreshes whose curvature was not finite",
    "retried: refreshes with more damping or in float64",
    "plain: refreshes without an inverse or root",
    "steps: steps of this layer alone that were skipped",
)
EIGENVALUE_LEGEND = (
    "h_1, h_2: smallest and largest eigenvalue of the matrix whose inverse is used",
    "h_2 / h_1: its condition number",
)


class HealthWarning(UserWarning):
    """The warning of a fault that the optimizer has handled. To stop training instead, turn it into an error.

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
        name: the parameter's name.
        gradients: steps skipped because its gradient was not finite.
        dropped: refreshes dropped because its curvature was not finite.
        retried: refreshes that needed a second attempt, with more damping (NGPlus) or in float64.
        plain: refreshes without an inverse or root: NGPlus uses the plain gradient, NGAdam the root of the diagonal.
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

    They are $h_1$ and $h_2$ of the paper's Assumption 1. For NGAdam they are those of the matrix by whose inverse the
    momentum becomes the direction: products of the eigenvalues of $(L + \lambda I)^{1/2}$ and
    $(R + \lambda I)^{1/2}$, divided by $\sqrt{\operatorname{tr} L}$.

    Attributes:
        name: the parameter's name.
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
    r"""Counts since the optimizer was created, and the layers that had faults; ``print(health)`` shows a table.

    Attributes:
        steps: calls of ``step`` with gradients.
        skipped: those of them that were skipped because gradients were not finite.
        layers: the layers that had faults.
        eigenvalues: the extreme eigenvalues of each layer's $\lambda I + L$, after ``health(eigenvalues=True)``.
        update_rms: root mean square of the change of the parameters in the last step; NaN before it, and for
            Preconditioner. Sharded parameters count with this rank's shard, also in ``parameter_rms``.
        parameter_rms: root mean square of the parameters.

    Examples:
        >>> optimizer = ngplus.NGPlus(nn.Linear(3, 2))
        >>> print(optimizer.health())
        0 steps, 0 skipped; no layer had a fault
    """

    steps: int
    skipped: int
    layers: tuple[LayerHealth, ...]
    eigenvalues: tuple[EigenvalueBounds, ...] = ()
    update_rms: float = math.nan
    parameter_rms: float = math.nan

    @property
    def good(self) -> bool:
        """Whether there was no fault. Steps that a GradScaler skips do not count."""
        return not self.skipped and not self.layers

    def __getitem__(self, name: str) -> LayerHealth:
        """Returns the counts of a layer, zeros if it had no faults."""
        return next((layer for layer in self.layers if layer.name == name), LayerHealth(name))

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as plain dicts, for a log."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        r"""Returns numbers for any logger, under names that stay the same over training.

        - ``steps``, ``skipped``, ``update_rms``, ``parameter_rms``: the attributes
        - ``faults/gradients``, ``faults/dropped``, ``faults/retried``, ``faults/plain``, ``faults/steps``: sums over
          the layers
        - ``h1``, ``h2``, ``condition``: the smallest $h_1$, largest $h_2$ and largest $h_2 / h_1$ of all layers, after
          ``health(eigenvalues=True)`` and the first refresh; ``h1/NAME`` and so on for each layer

        Examples:
            >>> model = nn.Linear(3, 2)
            >>> optimizer = ngplus.NGAdam(model)
            >>> model(torch.randn(8, 3)).square().mean().backward()
            >>> optimizer.step()
            >>> found = optimizer.health().scalars()
            >>> found["steps"], found["faults/dropped"], found["update_rms"] > 0
            (1.0, 0.0, True)
        """
        found = {"steps": float(self.steps), "skipped": float(self.skipped)}
        found.update({f"faults/{kind}": float(sum(getattr(layer, kind) for layer in self.layers)) for kind in FAULTS})
        found.update(update_rms=self.update_rms, parameter_rms=self.parameter_rms)
        of_all: dict[str, list[float]] = {"h1": [], "h2": [], "condition": []}
        for bounds in self.eigenvalues:
            numbers = {"h1": bounds.h1, "h2": bounds.h2, "condition": bounds.h2 / bounds.h1}
            found.update({f"{key}/{bounds.name}": number for key, number in numbers.items()})
            for key, number in numbers.items():
                of_all[key].append(number)
        if self.eigenvalues:
            found.update(h1=min(of_all["h1"]), h2=max(of_all["h2"]), condition=max(of_all["condition"]))
        return found

    def __str__(self) -> str:
        first = f"{self.steps} steps, {self.skipped} skipped"
        counts = [(layer.name, *(str(getattr(layer, fault)) for fault in FAULTS)) for layer in self.layers]
        bounds = [(b.name, f"{b.h1:.3g}", f"{b.h2:.3g}", f"{b.h2 / b.h1:.3g}") for b in self.eigenvalues]
        shown = [first if self.layers else f"{first}; no layer had a fault"]
        of_bounds = ("layer", "h_1", "h_2", "h_2 / h_1")
        for heads, rows, explained in ((("layer", *FAULTS), counts, LEGEND), (of_bounds, bounds, EIGENVALUE_LEGEND)):
            if rows:
                lines = within_width([heads, *rows])
                shown += [lines[0], "-" * len(lines[0]), *lines[1:], *legend(explained)]
        return "\n".join(shown)


Update = tuple[Tensor, Tensor]  # the lengths of the changes of parameters, [n], and which of them were left out


class FaultCounter:
    """Counts faults by kind and name, on the device where they are found. There is no warning of the kinds in
    ``harmless``."""

    def __init__(self, harmless: Sequence[str] = ()) -> None:
        self.steps = 0
        self._harmless = harmless
        self._counts: Counter[tuple[str, str]] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._new: dict[str, list[str]] = {}
        self._on_device: dict[tuple[str, tuple[str, ...]], Tensor] = {}  # counts that are not copied yet
        self._copies: list[tuple[str, tuple[str, ...], Tensor, Any]] = []  # copies to the host, with their events
        self._failing: set[str] = set()
        self._updates: Sequence[Update] = ()  # of the last step, one for each parameter group

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

    def note_updates(self, updates: Sequence[Update]) -> None:
        """Keeps the sizes of the last step, without reading them."""
        if torch.compiler.is_compiling():
            uncompiled()(self.note_updates, updates)
            return
        self._updates = updates

    def _count(self, kind: str, name: str, times: int) -> None:
        if not times:
            return
        entry = (kind, name)
        self._counts[entry] += times
        if kind in FAULTS and kind not in self._harmless and entry not in self._warned:
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

    def health(self, params: Sequence[Tensor] = ()) -> Health:
        """All counts, and the sizes of these parameters and of their last update; waits for the devices."""
        self.fetch()
        for _, _, _, event in self._copies:
            if event is not None:
                event.synchronize()
        self.fetch()
        names = dict.fromkeys(name for kind, name in self._counts if kind in FAULTS)
        layers = tuple(LayerHealth(n, **{kind: self._counts[kind, n] for kind in FAULTS}) for n in names)
        length = sum(param.numel() for param in params)
        parameter_rms = float(norms_of(params).norm()) / length**0.5 if length else math.nan
        squares = [float(lengths.masked_fill(left_out, 0).square().sum()) for lengths, left_out in self._updates]
        update_rms = (sum(squares) / length) ** 0.5 if squares and length else math.nan
        return Health(
            self.steps, self._counts["skipped", ""], layers, update_rms=update_rms, parameter_rms=parameter_rms
        )
