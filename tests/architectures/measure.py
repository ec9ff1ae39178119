"""Compares the curvature that NGPlus captures with brute force: one forward and backward pass for each sample."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import ngplus
from architectures.cases import Architecture, Case
from helpers.steps import PAPER
from ngplus.capture.sample_axis import tensors
from ngplus.diagnostics.plan import PlanRow

EXACT, EXACT_IN_FLOAT32 = 1e-6, 1e-3  # the largest relative errors of matrices that are called per-sample


@dataclass
class Found:
    """What one refresh on an architecture has shown.

    Attributes:
        sources: the number of matrices with gradients by source, "sample", "vmap" and "batch".
        reasons: the number of matrices with mini-batch curvature by reason.
        errors: the relative error of L or R by matrix, of those called per-sample.
        float32: the model computes in float32 although its parameters are float64.
    """

    sources: Counter[str]
    reasons: Counter[str]
    errors: dict[str, float]
    float32: bool

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def tolerance(self) -> float:
        return EXACT_IN_FLOAT32 if self.float32 else EXACT


def measure(architecture: Architecture) -> Found:
    """One refresh of NGPlus, and the same L and R by brute force."""
    torch.manual_seed(0)
    case = architecture.build()
    with quiet():
        with Float32Watch() as watch:
            outputs = case.outputs(call(case.model, case.batch))
        gradients = [] if architecture.mixes else per_sample_gradients(case, weights_of(outputs))
        optimizer = ngplus.NGPlus(
            case.model, lr=0.0, momentum=0.0, damping=1.0, update_every=1, solver="dense", **{**PAPER, **case.options}
        )
        outputs = case.outputs(call(case.model, case.batch))
        loss_of(outputs, weights_of(outputs)).div(len(outputs[0])).backward()
        optimizer.step()
    used = {name for name, p in case.model.named_parameters() if p.grad is not None}
    rows = [row for row in optimizer.plan() if used.intersection(row.parameters)]
    return Found(
        Counter(row.source for row in rows),
        Counter(reason_of(row.note) for row in rows if row.source == "batch"),
        errors(optimizer, rows, gradients) if gradients else {},
        watch.seen,
    )


def errors(
    optimizer: ngplus.NGPlus, rows: Sequence[PlanRow], gradients: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    found = {}
    for row in rows:
        if row.source not in ("sample", "vmap"):
            continue
        matrix = optimizer._find_matrix(row.name)
        names = [matrix.names[part] for part in matrix.parts]
        stack = torch.stack([matrix.layout.join([one[name] for name in names]) for one in gradients])
        pattern = "sgij,sgkj->gik" if row.side == "left" else "sgji,sgjk->gik"
        wanted = torch.einsum(pattern, stack, stack) / len(gradients)
        got = optimizer.curvature(row.name).matrix.reshape(wanted.shape)
        difference, scale = float((got - wanted).norm()), float(wanted.norm())
        found[row.name] = difference / scale if scale else float(difference > 0)
    return found


def per_sample_gradients(case: Case, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """N c_i: the gradient of each sample's own loss, by the name of the parameter."""
    found = []
    for i, one in enumerate(case.ones):
        case.model.zero_grad()
        loss_of(case.outputs(call(case.model, one)), [w[i : i + 1] for w in weights]).backward()
        found.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
                for name, p in case.model.named_parameters()
            }
        )
    case.model.zero_grad()
    return found


def weights_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]


def loss_of(outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum over samples of a loss that each has for itself."""
    return sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True))  # type: ignore[return-value]


def call(model: Any, inputs: Mapping[str, Any]) -> Any:
    args = [x for name, x in inputs.items() if name.startswith("_")]
    return model(*args, **{name: x for name, x in inputs.items() if not name.startswith("_")})


def reason_of(note: str) -> str:
    """The reason without what differs between matrices of one model."""
    return note.partition(": ")[0] if note.startswith(("vmap", "its module has a forward")) else note


class Float32Watch(TorchFunctionMode):
    """Sees whether float32 tensors take part in the gradient."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor | tuple | list):
            self.seen = self.seen or any(x.dtype == torch.float32 and x.requires_grad for x in tensors(out))
        return out


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
