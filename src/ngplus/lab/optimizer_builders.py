"""How the optimizers of :mod:`ngplus.lab.optimizers` are made for a model: which parameters each of them gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ngplus.lab.optimizer_wrappers import AsMatrices, PlainState, Together, Trainer


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
    the last matrix, or a table where one is tied to a Linear layer."""
    dense, sparse = _split(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    tied = any(isinstance(m, nn.Linear) and id(m.weight) in tables for m in model.modules())
    matrices = [p for p in dense if p.ndim >= 2 and id(p) not in tables]
    matrices = matrices if tied else matrices[:-1]
    hidden = {id(p) for p in matrices}
    rest = [p for p in dense if id(p) not in hidden]
    parts: list[Trainer] = [AsMatrices(matrices, lambda p: cls(p, **hyper))] if matrices else []
    if rest:
        parts.append(torch.optim.AdamW(rest, lr=hyper["lr"], weight_decay=hyper["weight_decay"]))
    return _with_tables(Together(*parts), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))


def shampoo(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    dense, sparse = _split(model)
    return _with_tables(PlainState(cls(dense, **hyper)), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))
