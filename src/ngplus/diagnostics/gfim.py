"""``ngplus.gfim``: the exact curvature of one batch, outside of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.capture import reasons
from ngplus.capture.accumulator import Accumulator
from ngplus.capture.batch import BatchDims
from ngplus.capture.matrices import ParameterMatrix, collect, named
from ngplus.capture.recorder import Recorder
from ngplus.capture.sample_index import SampleIndex
from ngplus.fisher.factors import Factors
from ngplus.preconditioners import ngplus_curvature as curvatures
from ngplus.preconditioners.ngplus_curvature import Curvature
from ngplus.utils.precision import bfloat16_products, full_precision
from ngplus.utils.validation import choice
from ngplus.utils.warnings import warn


class CurvatureDict(dict[str, Curvature]):
    """The curvature of each parameter by its name: what :func:`ngplus.gfim` returns.

    Attributes:
        sources: where each comes from, as in :class:`ngplus.PlanRow`: "sample", "vmap", or "batch", the product of the
            mini-batch gradient with itself.
        notes: for each parameter with "batch", the reason.

    Examples:
        >>> found = ngplus.gfim(nn.GRU(3, 2), lambda y, _: y[0].square().mean(), torch.randn(4, 5, 3), None)
        >>> set(found.sources.values()), found.notes["bias_ih_l0"]
        ({'batch'}, 'its module has several outputs: GRU')
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, str] = {}
        self.notes: dict[str, str] = {}


def gfim(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    *,
    side: str = "smaller",
    loss_reduction: str = "mean",
    batch_dim: BatchDims = 0,
    sample_index: SampleIndex | None = None,
) -> CurvatureDict:
    """Computes the exact L or R of each parameter for the loss of one batch, ``loss_fn(model(inputs), targets)``.

    Leaves ``.grad`` as it is. A bias has the same entry as its weight. Parameters without per-sample gradients get
    the product of their mini-batch gradient; ``sources`` of the result shows which.

    Examples:
        >>> model, x = nn.Linear(3, 2), torch.randn(5, 3)
        >>> found = ngplus.gfim(model, nn.functional.mse_loss, x, torch.zeros(5, 2))
        >>> sorted(found)
        ['bias', 'weight']
        >>> found["weight"].side, tuple(found["weight"].matrix.shape)
        ('left', (2, 2))
        >>> found.sources
        {'weight': 'sample', 'bias': 'sample'}

    Args:
        model (Module): the module, in train or eval mode.
        loss_fn (callable): takes the model's output and the targets, and returns the loss.
        inputs (Tensor, tuple, list or dict): the input of the model, its arguments, or its keyword arguments.
        targets: the second argument of ``loss_fn``.
        side (str): as in ``NGPlus`` (default: ``"smaller"``).
        loss_reduction (str): as in ``NGPlus`` (default: ``"mean"``).
        batch_dim (int or dict): as in ``NGPlus`` (default: 0).
        sample_index (callable): as in ``NGPlus`` (default: None).
    """
    choice("side", side, ("smaller", "left", "right"))
    choice("loss_reduction", loss_reduction, ("mean", "sum"))
    params = {p: name for p, name in named(model.named_parameters()).items() if p.requires_grad and p.numel()}
    matrices, uses = collect(model, params)
    group: dict[str, Any] = {
        "side": side, "block_size": None, "samples": None, "sketch": None, "solver": "dense", "curvature": "sample",
        "loss_reduction": loss_reduction,
    }  # fmt: skip
    gathered: dict[int, Accumulator] = {}  # by id of the matrix, as the two below
    captured: dict[int, list[Tensor]] = {}  # sum_i G_i of each part, to find uses that were not captured
    tolerances: dict[int, float] = {}

    def sink(matrix: ParameterMatrix, factors: Factors) -> None:
        gathered.setdefault(id(matrix), Accumulator()).take_in(matrix, factors, group, seed=0)
        captured.setdefault(id(matrix), []).append(factors.gradient_sum(matrix.dtype))
        half = factors.half_precision or bfloat16_products(matrix.params[0].device)
        tolerances[id(matrix)] = 5e-2 if half else tolerances.get(id(matrix), 1e-3)

    capture = Recorder(model, uses, sink, batch_dim, sample_index=sample_index)
    capture.in_eval = True
    for matrix in matrices:
        matrix.armed, matrix.refresh_memory = True, sys.maxsize
    capture.note_armed()
    try:
        with torch.enable_grad():
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            else:
                output = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
            grads = torch.autograd.grad(loss_fn(output, targets), list(params), allow_unused=True)
        capture.flush()
        if complaint := capture.complaint():
            warn(complaint)
    finally:
        capture.remove()
    of_param = dict(zip(params, grads, strict=True))
    result = CurvatureDict()
    for matrix in matrices:
        taken, partition = matrix.side(side), matrix.partition_of(group)
        found = [of_param[p] for p in matrix.active_params]
        filled = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(matrix.params, found, strict=True)]
        gradient = matrix.layout.join(filled).to(matrix.dtype)
        sums = gathered.get(id(matrix))
        if sums is None:
            matrix.missed = matrix.not_captured or reasons.NOT_CALLED
        elif matrix.source != "batch":
            missed = torch.linalg.vector_norm(gradient - torch.stack(captured[id(matrix)]).sum(0))
            if bool(missed > tolerances[id(matrix)] * sums.length()):
                matrix.fall_back(matrix.uncovered)
        with full_precision(gradient.device):
            if sums is not None and matrix.source != "batch":
                estimate = curvatures.per_sample(sums, group, partition)
            else:
                estimate = curvatures.mini_batch(matrix, gradient, group, seed=0)
            dense = partition.dense(estimate.dense())
        entry = Curvature(taken, dense[0] if matrix.groups == 1 else dense)
        result.update(dict.fromkeys(matrix.names, entry))
        result.sources.update(dict.fromkeys(matrix.names, matrix.refreshed_from))
        result.notes.update(dict.fromkeys(matrix.names if matrix.note else (), matrix.note))
    return result
