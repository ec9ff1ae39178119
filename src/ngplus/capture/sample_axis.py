"""Where the samples are in a tensor, and the registry of rules that derive it for the results of torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class SampleAxis:
    """Samples lie along dimension ``dim``, which has ``outer * samples * inner`` entries: entry i is of the sample
    (i // inner) % samples.

    ``inner`` is above 1 after [samples, positions] was flattened, ``outer`` after [positions, samples] was. ``blank``:
    the entries do not depend on the samples, only the shape does, as that of ``zeros_like(x)``.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    blank: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class UnknownAxis:
    """Depends on the samples, but it is not known which entries are of which. ``function`` is where that began.
    ``chosen``: all it did was to choose rows by a mask. ``moved``: it may have put rows into another order."""

    function: str
    chosen: bool = False
    moved: bool = False


Location = SampleAxis | UnknownAxis | None  # None: does not depend on the samples


class Tracker(Protocol):
    samples: int
    of_rows: bool  # does it follow rows, of which several are of one sample?
    unbatched: bool  # is the input one sample without a batch dimension?
    across: str  # a function that runs over the dimension of the samples, as attention does over positions; "" for none
    crossed: bool  # have two tensors been added whose samples lie along different dimensions?

    def of(self, x: Any) -> Location:
        """Returns where the samples of a tensor are."""

    def mark(self, x: Tensor, location: Location) -> None:
        """Sets where the samples of a tensor are."""


Rule = Callable[[Tracker, Sequence[Any], dict[str, Any], Any], Any]
RULES: dict[str, Rule] = {}  # by the name of the function or method


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the functions of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested sequences, mappings, dataclasses, and objects with ``to_dict`` and ``keys``, as
    torch_geometric's Data."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from tensors(x)
    elif isinstance(tree, Mapping):
        yield from tensors(list(tree.values()))
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from tensors([getattr(tree, field.name) for field in fields(tree)])
    elif hasattr(tree, "to_dict") and hasattr(tree, "keys"):
        yield from tensors(tree.to_dict())


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, *names: str, default: Any = None) -> Any:
    """Returns an argument by one of its names or its place."""
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return args[place] if len(args) > place else default


def agreed(found: Iterable[Location]) -> Any:
    """Returns the axis on which these locations agree, if there is one. Rows that are not known keep the places of
    known rows to which they are added, but not those of blank ones; nor do rows in another order."""
    each = [location for location in found if location is not None]
    axes = [axis for axis in each if isinstance(axis, SampleAxis)]
    blank = all(axis.blank for axis in axes)
    moved = any(location.moved for location in each if isinstance(location, UnknownAxis))
    if not axes or set(axes) != {axes[0]} or moved or (blank and len(axes) < len(each)):
        return ...
    return replace(axes[0], blank=blank)
