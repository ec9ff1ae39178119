"""How the optimizers of :mod:`ngplus.lab.optimizers` are made for a model: which parameters each of them gets."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ngplus.lab.optimizer_wrappers import AsMatrices, Averaged, ExactState, PlainState, Together, Trainer


def _sparse(model: nn.Module) -> list[nn.Parameter]:
    """The tables whose gradients are sparse."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
    return [p for m in tables for p in (m.weight,) if isinstance(p, nn.Parameter) and p.requires_grad]


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    sparse = _sparse(model)
    tables = {id(p) for p in sparse}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in tables], sparse


def _with_tables(dense: Trainer, sparse: list[nn.Parameter], make: Callable[[list[nn.Parameter]], Trainer]) -> Trainer:
    return Together(dense, make(sparse)) if sparse else dense


def of_model(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    trainer: Trainer = cls(model, **hyper)
    return trainer


def ngplus(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """A model whose rows are not its samples says of which sample each is."""
    own = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return of_model(model, cls, {**hyper, "sample_index": getattr(own, "sample_index", None)})


def of_parameters(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    trainer: Trainer = cls([p for p in model.parameters() if p.requires_grad], **hyper)
    return trainer


def beside_sgd(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """Sparse tables get plain SGD: momentum and decay would touch every row."""
    dense, sparse = _split(model)
    return _with_tables(cls(dense, **hyper), sparse, lambda p: torch.optim.SGD(p, lr=hyper["lr"]))


def beside_sparse_adam(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """Sparse tables get torch's SparseAdam with the same learning rate."""
    dense, sparse = _split(model)
    return _with_tables(cls(dense, **hyper), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))


def muon(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """Muon on the hidden matrices; AdamW on vectors, embeddings and the output, as its authors advise. The output is
    the last matrix, or a table where one is tied to a Linear layer. AdamW's rate is Muon's where ``adamw_lr`` is not
    given; a step's decay, lr * weight_decay, is the same for both."""
    hyper = dict(hyper)
    adamw_lr = hyper.pop("adamw_lr", None)
    other = hyper["lr"] if adamw_lr is None else adamw_lr
    dense, sparse = _split(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    tied = any(isinstance(m, nn.Linear) and id(m.weight) in tables for m in model.modules())
    matrices = [p for p in dense if p.ndim >= 2 and id(p) not in tables]
    matrices = matrices if tied else matrices[:-1]
    hidden = {id(p) for p in matrices}
    rest = [p for p in dense if id(p) not in hidden]
    parts: list[Trainer] = [AsMatrices(matrices, lambda p: cls(p, **hyper))] if matrices else []
    if rest:
        decay = hyper["weight_decay"] * hyper["lr"] / other if other else hyper["weight_decay"]
        parts.append(torch.optim.AdamW(rest, lr=other, weight_decay=decay))
    return _with_tables(Together(*parts), sparse, lambda p: torch.optim.SparseAdam(p, lr=other))


def shampoo(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    dense, sparse = _split(model)
    return _with_tables(PlainState(cls(dense, **hyper)), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))


def schedule_free(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """``beta1`` is the first of its betas."""
    hyper = dict(hyper)
    if (beta1 := hyper.pop("beta1", None)) is not None:
        beta2 = hyper.get("betas", inspect.signature(cls).parameters["betas"].default)[1]
        hyper["betas"] = (beta1, beta2)
    dense, sparse = _split(model)
    return _with_tables(Averaged(cls(dense, **hyper)), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))


def splus(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """It takes the sign of what is no matrix, so that convolutions are flattened. Sparse tables get SparseAdam with its
    rate for what is no matrix."""
    dense, sparse = _split(model)
    rate = hyper["lr"] * inspect.signature(cls).parameters["nonstandard_constant"].default
    own = Averaged(AsMatrices(dense, lambda p: cls(p, **hyper)))
    return _with_tables(own, sparse, lambda p: torch.optim.SparseAdam(p, lr=rate))


def from_heavyball(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """Without torch.compile, which takes longer than a short run, and needs a C++ compiler on a CPU."""
    utils: Any = importlib.import_module("heavyball.utils")
    utils.compile_mode = None
    dense, sparse = _split(model)
    return _with_tables(ExactState(cls(dense, **hyper)), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))
