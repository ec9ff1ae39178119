"""Learning rates of the directions: with ``rate_gain``, each row and each column of a matrix in its eigenbases has a
factor to the learning rate of its own; a number of the step is multiplied by both.

Its logarithm rises while the gradient goes on along the first moment, and falls where it turns against it, which is
what too long a step makes it do. In the axes of the curvature directions are nearly independent of one another, so that
one may be slowed down while another one is sped up; in those of the weights they are mixed. A matrix with one or two
rows or columns, such as a bias or the vectors of a norm layer, has its two factors as a whole; blocks of one side have
factors each for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

RATES = ("rate_row", "rate_col")  # in the state: the logarithms of the factors
LIMIT = math.log(4.0)  # of a logarithm, up and down
SLOW = 0.5  # in step t it rises by so much / t less: the learning rate itself may be on its way up

Pair = tuple[Tensor, Tensor]  # what each row has, [.., p, 1], and each column, [.., 1, D]


def has_directions(rows: int, cols: int) -> bool:
    """Are there rows and columns enough for each to have something of its own?"""
    return min(rows, cols) > 2


def no_rates(stacks: Sequence[Tensor]) -> list[Pair]:
    """The logarithms for a gradient in these stacks before the first step."""
    if has_directions(*stacks[0].shape[-2:]):
        return [(x.new_zeros(len(x), x.shape[1], 1), x.new_zeros(len(x), 1, x.shape[2])) for x in stacks]
    return [(x.new_zeros(len(x), 1, 1), x.new_zeros(len(x), 1, 1)) for x in stacks]


class Following:
    """The rates of many matrices in a step. Made before the first moments take the gradients in, which are compared
    with what was there before them."""

    def __init__(self, rates: list[Pair], gradients: list[Tensor], first: list[Tensor]) -> None:
        self._rates, self._gradients = rates, gradients
        self._before = [moment.clone() for moment in first]

    def move(self, roots: list[Tensor], counts: Sequence[int], gain: float) -> None:
        """The logarithms rise by ``gain`` times the cosines of gradients and first moments, in the metric of the steps:
        that of the ``roots`` which these are divided by. ``counts``: the steps that each matrix has seen."""
        metric = torch._foreach_sqrt(roots)  # squares of what is divided by it are not too small for the numbers
        gradients, before = (torch._foreach_div(each, metric) for each in (self._gradients, self._before))
        logs = [log for pair in self._rates for log in pair]
        cosines = self._sums(torch._foreach_mul(gradients, before))
        for each in (gradients, before):
            lengths = self._sums(torch._foreach_mul(each, each))
            torch._foreach_sqrt_(lengths)
            torch._foreach_clamp_min_(lengths, [_least(log.dtype) for log in logs])
            torch._foreach_div_(cosines, lengths)
        torch._foreach_mul_(cosines, gain)
        late = torch._foreach_clamp_max(cosines, [SLOW / count for count in counts for _ in RATES])
        torch._foreach_clamp_min_(late, 0.0)
        torch._foreach_sub_(cosines, late)
        torch._foreach_add_(logs, cosines)
        torch._foreach_clamp_min_(logs, -LIMIT)
        torch._foreach_clamp_max_(logs, LIMIT)

    def scale(self, steps: list[Tensor]) -> None:
        """The steps times the factors of their rows, and of their columns."""
        for side in zip(*self._rates, strict=True):
            torch._foreach_mul_(steps, torch._foreach_exp(side))

    def _sums(self, products: Sequence[Tensor]) -> list[Tensor]:
        """Over what a row, a column or the whole has: in tensors of their own, of the shapes of the logarithms."""
        pairs = zip(products, self._rates, strict=True)
        return [x.sum([d for d in (1, 2) if log.shape[d] == 1], keepdim=True) for x, pair in pairs for log in pair]


def _least(dtype: torch.dtype) -> float:
    """A length below this has lost digits in its square: there is no telling where such a vector points."""
    return math.sqrt(torch.finfo(dtype).tiny / torch.finfo(dtype).eps)
