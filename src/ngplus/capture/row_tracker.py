"""Follows the rows that ``sample_index`` tells the samples of, as those of the nodes of graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ngplus.capture import reasons
from ngplus.capture.axis_rules import entrywise
from ngplus.capture.batch import Batch
from ngplus.capture.sample_axis import RULES, Location, SampleAxis, UnknownAxis
from ngplus.capture.sample_index import Ragged
from ngplus.capture.sample_tracker import SUMS_OF_ROWS, SampleTracker

#: Products, whose rows are those of the first factor.
PRODUCTS = {"_sparse_mm", "addmm", "baddbmm", "bmm", "einsum", "matmul", "mm", "mv"}


class RowTracker(SampleTracker):
    """Knows which tensors of one forward pass have the rows of one index, in its order: each row counts as a sample.

    A tensor with as many entries as the index in its first dimension (after those of size 1) has these rows, in this
    order, if it was computed from the inputs, and no function has put the rows of the inputs into another order, such
    as x[order], a sort or a flip. Sums of rows, as of messages to nodes, have those that their index says.
    """

    of_rows = True

    @property
    def found(self) -> bool:
        """Does an input of the model have these rows?"""
        return any(isinstance(location, SampleAxis) for location in self._locations.values())

    def _of_input(self, x: Tensor) -> Location:
        dims = [self._dim, _first(x)] if x.is_floating_point() else [self._dim, *range(x.dim())]  # an index [2, edges]
        found = (SampleAxis(dim) for dim in dims if x.shape[dim : dim + 1] == (self.samples,))
        return next(found, UnknownAxis("the inputs of the model"))

    def _unknown(self, name: str, given: Sequence[Location]) -> UnknownAxis:
        if name in SUMS_OF_ROWS:
            return UnknownAxis(name)
        moved = next((each for each in given if isinstance(each, UnknownAxis) and each.moved), None)
        known = any(isinstance(each, SampleAxis) for each in given)
        keeps = name in PRODUCTS or RULES.get(name) is entrywise
        return moved or UnknownAxis(name, moved=known and not keeps)

    def mark(self, x: Tensor, location: Location) -> None:
        if isinstance(location, UnknownAxis) and not location.moved:
            dim = _first(x)
            location = SampleAxis(dim) if x.shape[dim : dim + 1] == (self.samples,) else location
        super().mark(x, location)


def _first(x: Tensor) -> int:
    """The first dimension that has another size than 1."""
    return next((i for i, size in enumerate(x.shape) if size != 1), 0)


def batch_of_rows(
    x: Tensor, trackers: Sequence[RowTracker], samples: int | None, ragged: Mapping[int, Ragged]
) -> Batch | str:
    """Returns the samples of the rows of x, or the reason why they are not known."""
    found = [tracker.of(x) for tracker in trackers]
    for location in found:
        if isinstance(location, SampleAxis) and location.outer == location.inner == 1:
            return Batch(location.dim, samples, ragged)
    if all(location is None for location in found):
        return reasons.SHARED_INPUT
    moved = next((each for each in found if isinstance(each, UnknownAxis) and each.moved), None)
    if moved is not None and any(size in ragged for size in x.shape[:-1]):
        return reasons.with_detail(reasons.ROWS_UNKNOWN, f"after {moved.function}")
    return reasons.with_detail(reasons.NO_SAMPLE_INDEX, f"a batch dimension of {len(x) if x.dim() else 1}")
