"""Every rule of the tracker of samples against the truth: which entries change with a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_calls import CALLS, ELSEWHERE, MIXING, Call
from torch import Tensor

from ngplus.capture.sample_axis import RULES, Location, SampleAxis, UnknownAxis, tensors
from ngplus.capture.sample_tracker import SampleTracker

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore")]

#: Functions that never keep the samples.
NEVER_KNOWN = {"masked_select"}
#: x as it is, with [samples, positions] flattened, and with [positions, samples] flattened.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "inner": lambda x: x.flatten(0, 1),
    "outer": lambda x: x.transpose(0, 1).flatten(0, 1),
}


class Names(SampleTracker):
    """Remembers the functions that it has followed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()

    def _follow(self, name: str, *args: Any) -> None:
        self.names.add(name)
        super()._follow(name, *args)


def run(function: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return list(tensors(function(x)))


def entries(shape: tuple[int, ...], seed: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def changed(function: Callable[[Tensor], Any], x: Tensor, dim: int) -> list[list[Tensor]]:
    """For each sample, and each result of the function, which entries another sample in its place changes."""
    before, other = run(function, x), entries(tuple(x.shape), 1)
    found = []
    for i in range(x.shape[dim]):
        changed_x = x.clone()
        changed_x.select(dim, i).copy_(other.select(dim, i))
        after = run(function, changed_x)
        found.append([_differs(a, b) for a, b in zip(before, after, strict=True)])
    return found


def _differs(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:  # as of a mask
        return torch.ones(a.shape, dtype=torch.bool)
    return ~torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)


def owner_of(x: Tensor, axis: SampleAxis, samples: int) -> Tensor:
    """The sample of each entry."""
    place = (torch.arange(x.shape[axis.dim]) // axis.inner) % samples
    return place.view([-1 if d == axis.dim else 1 for d in range(x.dim())]).expand(x.shape)


def agrees(x: Tensor, location: Location, by_sample: list[Tensor], mixes: bool) -> bool:
    if isinstance(location, UnknownAxis):
        return True
    if location is None:
        return not any(bool(each.any()) for each in by_sample)
    owner = owner_of(x, location, len(by_sample))
    every = torch.stack(by_sample)  # [samples, ...]
    own = every.gather(0, owner[None])[0]
    if mixes:  # an entry that depends on any sample depends on its own
        return bool((own | ~every.any(0)).all())
    return not bool((every.sum(0) > own.long()).any())


def known(name: str, call: Call, form: str, dim: int) -> tuple[int, bool]:
    """Checks the results of a call; returns how many are known, and whether the function was called by that name."""

    def function(x: Tensor) -> Any:
        return call.function(FORMS[form](x))

    x = entries(call.shape, 0)
    truth = changed(function, x, dim)
    tracker, x = Names(x.shape[dim], x, dim), x.clone()
    tracker.mark(x, SampleAxis(dim))
    with tracker:
        results = run(function, x)
    locations = [tracker.of(result) for result in results]
    for i, (result, location) in enumerate(zip(results, locations, strict=True)):
        by_sample = [each[i] for each in truth]
        assert agrees(result, location, by_sample, name in MIXING), f"{location} of {tuple(result.shape)}, not so"
    by_name = not tracker.names.isdisjoint({name, name.strip("_")})  # == is eq or __eq__, with numpy or without
    return sum(not isinstance(location, UnknownAxis) for location in locations), by_name


def test_every_rule_has_a_call() -> None:
    assert set(CALLS) - set(RULES) == set()
    assert set(RULES) - set(CALLS) - set(ELSEWHERE) == set()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_rule(name: str) -> None:
    total, seen = 0, False
    for call in CALLS[name]:
        for dim in range(len(call.shape)):
            found, by_name = known(name, call, "plain", dim)
            total, seen = total + found, seen or by_name
    assert seen, "no call is dispatched by this name"
    assert total or name in NEVER_KNOWN, "the rule never applies"


@pytest.mark.parametrize("form", ["inner", "outer"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_rule_on_flattened_samples(name: str, form: str) -> None:
    for call in CALLS[name]:
        try:
            run(lambda x, call=call: call.function(FORMS[form](x)), entries(call.shape, 0))
        except Exception:  # the function does not take that shape
            continue
        for dim in (0, 1):
            known(name, call, form, dim)
