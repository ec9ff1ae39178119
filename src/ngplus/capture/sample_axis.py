"""Where the samples are in a tensor, and the registry of rules that derive it for the results of torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class SampleAxis:
    """Samples lie along dimension ``dim``, which has ``outer * samples * inner`` entries: entry i is of the sample
    (i // inner) % samples.

    ``inner`` is above 1 after [samples, positions] was flattened, ``outer`` after [positions, samples] was.
    """

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class UnknownAxis:
    """Depends on the samples, but it is not known which entries are of which. ``function`` is where that began.
    ``chosen`` says that all it did was to choose rows by a mask."""

    function: str
    chosen: bool = False


Location = SampleAxis | UnknownAxis | None  # None: does not depend on the samples


class Tracker(Protocol):
    samples: int
    unbatched: bool

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


def agreed(found: set[SampleAxis]) -> Any:
    """Returns the axis, if there is one and no other."""
    return found.pop() if len(found) == 1 else ...
