"""The optimizers by name, with their defaults and tuning ranges.

Each class is imported on first use. The run's schedule multiplies the learning rate. One or two hyper-parameters have a
tuning range; the others are fixed to the class's defaults, with the exceptions that docs/laboratory.md lists.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.lab.optimizer_wrappers import AsMatrices, PlainState, Together, Trainer


@dataclass(frozen=True)
class Range:
    """The range in which a hyper-parameter is tuned, as a multiple of a unit of :mod:`ngplus.lab.search`, and the value
    of the first trial; the optimizer's default where that is None."""

    low: float
    high: float
    log: bool = True
    unit: str = ""
    start: float | None = None


# arguments that no user sets by text: the laboratory gives the first three, torchrun's processes decide the others
NOT_SET = ("params", "model", "sample_index", "process_group", "distribution")
Build = Callable[[nn.Module, type[Any], dict[str, Any]], Trainer]


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that the commands can train with. ``where`` is its class, ``module:name``."""

    name: str
    title: str
    where: str
    build: Build
    defaults: Mapping[str, Any]
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def load(self) -> type[Any]:
        """Its class. ModuleNotFoundError without its library, ValueError where that does not have it."""
        module, _, name = self.where.partition(":")
        try:
            cls: type[Any] = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:  # the commands say what to install
            raise
        except (ImportError, AttributeError) as error:
            library = "torch>=2.9" if module == "torch.optim" else module.replace("_", "-")
            raise ValueError(
                f"The optimizer {self.name!r} needs {module}.{name}: {error}. pip install --upgrade {library!r}, or "
                f"leave {self.name} out of --optimizers"
            ) from error
        return cls

    def options(self) -> list[str]:
        """The names of its hyper-parameters."""
        parameters = inspect.signature(self.load()).parameters.values()
        return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in NOT_SET]

    def check(self, hyper: Mapping[str, Any]) -> None:
        """ValueError for one number where the class takes several, such as betas."""
        parameters = inspect.signature(self.load()).parameters
        for name, value in hyper.items():
            usual = parameters[name].default if name in parameters else None
            if isinstance(usual, tuple) and not isinstance(value, list | tuple):
                raise ValueError(f"--set {name} takes a list, as in --set {name}={list(usual)}, not {value!r}")

    def make(self, model: nn.Module, hyper: Mapping[str, Any]) -> Trainer:
        """The optimizer for a model; ValueError for a hyper-parameter that it does not have."""
        for name in hyper:
            check_name(name, self.options(), f"hyper-parameter of {self.name}")
        return self.build(model, self.load(), {**self.defaults, **hyper})


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """ValueError with the nearest name for one that is not known."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"There is no {what} {name!r}{hint} (known: {', '.join(known)})")


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


def _of_model(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    trainer: Trainer = cls(model, **hyper)
    return trainer


def _ngplus(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """A model whose rows are not its samples says of which sample each is."""
    own = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return _of_model(model, cls, {**hyper, "sample_index": getattr(own, "sample_index", None)})


def _of_parameters(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    trainer: Trainer = cls([p for p in model.parameters() if p.requires_grad], **hyper)
    return trainer


def _beside_sgd(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """Sparse tables get plain SGD: momentum and decay would touch every row."""
    dense, sparse = _split(model)
    return _with_tables(cls(dense, **hyper), sparse, lambda p: torch.optim.SGD(p, lr=hyper["lr"]))


def _beside_sparse_adam(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    """Sparse tables get torch's SparseAdam with the same learning rate."""
    dense, sparse = _split(model)
    return _with_tables(cls(dense, **hyper), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))


def _muon(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
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


def _shampoo(model: nn.Module, cls: type[Any], hyper: dict[str, Any]) -> Trainer:
    dense, sparse = _split(model)
    return _with_tables(PlainState(cls(dense, **hyper)), sparse, lambda p: torch.optim.SparseAdam(p, lr=hyper["lr"]))


# Algorithm 1 as the paper has it; damping is absolute there, and its refreshes are 200 to 1,000 steps apart.
PAPER_FORM: dict[str, Any] = {
    "relative_damping": 0.0, "curvature": "sample", "side": "smaller", "block_size": None, "graft": None,
}  # fmt: skip
_SGD_LR = Range(0.03, 30.0, unit="step", start=1.0)
_ADAM_LR = Range(3e-4, 1e-1)
_DAMPED = {
    "lr": Range(0.03, 100.0, unit="step * damping", start=0.3),
    "damping": Range(1.0, 1e4, unit="eigenvalue", start=100.0),
}
# SOAP leaves a wider side alone, Shampoo a whole matrix that has one: a table's would cost tens of AdamW's steps.
_WIDEST = 512

OPTIMIZERS: dict[str, OptimizerEntry] = {
    entry.name: entry
    for entry in (
        OptimizerEntry(
            "sgd", "SGD with momentum", "torch.optim:SGD", _beside_sgd, {"lr": 0.1, "momentum": 0.9}, {"lr": _SGD_LR}
        ),
        OptimizerEntry(
            "adagrad", "AdaGrad", "torch.optim:Adagrad", _of_parameters, {"lr": 0.03}, {"lr": Range(1e-3, 0.3)}
        ),
        OptimizerEntry("adam", "Adam", "torch.optim:Adam", _beside_sparse_adam, {"lr": 0.003}, {"lr": _ADAM_LR}),
        OptimizerEntry(
            "adamw",
            "AdamW",
            "torch.optim:AdamW",
            _beside_sparse_adam,
            {"lr": 0.003, "weight_decay": 0.01},
            {"lr": _ADAM_LR},
        ),
        OptimizerEntry(
            "muon",
            "Muon",
            "torch.optim:Muon",
            _muon,
            # match_rms_adamw: one learning rate serves Muon and the AdamW beside it
            {"lr": 0.003, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"},
            {"lr": _ADAM_LR},
        ),
        OptimizerEntry(
            "lars",
            "LARS",
            "pytorch_optimizer:LARS",
            _beside_sgd,
            {"lr": 1.0, "momentum": 0.9, "trust_coefficient": 0.01},
            {"lr": Range(3e-2, 30.0)},
        ),
        OptimizerEntry(
            "shampoo",
            "Shampoo",
            "pytorch_optimizer:ScalableShampoo",
            _shampoo,
            # RMSProp's step length and momentum as a moving average: learning rates are like Adam's
            {
                "lr": 0.003,
                "betas": (0.9, 0.95),
                "moving_average_for_momentum": True,
                "nesterov": False,
                "graft_type": 3,
                "start_preconditioning_step": 10,
                "preconditioning_compute_steps": 10,
                "no_preconditioning_for_layers_with_dim_gt": _WIDEST,
            },
            {"lr": _ADAM_LR},
        ),
        OptimizerEntry(
            "soap",
            "SOAP",
            "pytorch_optimizer:SOAP",
            _beside_sparse_adam,
            {"lr": 0.003, "weight_decay": 0.01, "precondition_frequency": 10, "max_precondition_dim": _WIDEST},
            {"lr": _ADAM_LR},
        ),
        OptimizerEntry(
            "kfac",
            "KFAC",
            "ngplus.baselines:KFAC",
            _of_model,
            {"lr": 0.1, "momentum": 0.9, "damping": 0.1, "update_every": 10},
            _DAMPED,
        ),
        OptimizerEntry(
            "seng",
            "SENG",
            "ngplus.baselines:SENG",
            _of_model,
            # columns of U: SchNet has thousands of rows a batch, and U^T U is inverted
            {"lr": 0.1, "momentum": 0.9, "damping": 0.3, "update_every": 10, "samples": 256},
            _DAMPED,
        ),
        OptimizerEntry(
            "ngplus",
            "NG+",
            "ngplus:NGPlus",
            _ngplus,
            {"lr": 0.1, "relative_damping": 1.0},
            {"lr": _SGD_LR, "relative_damping": Range(0.03, 10.0)},
        ),
        OptimizerEntry(
            "ngplus-paper",
            "NG+, the paper's form",
            "ngplus:NGPlus",
            _ngplus,
            {**PAPER_FORM, "lr": 0.1, "momentum": 0.9, "damping": 0.3, "update_every": 10},
            _DAMPED,
        ),
        OptimizerEntry("ngadam", "NGAdam", "ngplus:NGAdam", _of_model, {"lr": 0.005}, {"lr": _ADAM_LR}),
    )
}


# Forms of NGAdam before one was chosen, for tools/standard_runs.py. The commands take them, too, and do not list them.
_ROOTS = "ngplus.lab.candidates:Roots"
CANDIDATES: dict[str, OptimizerEntry] = {
    name: OptimizerEntry(name, title, _ROOTS, _of_model, {"lr": 0.005, **hyper}, {"lr": _ADAM_LR})
    for name, title, hyper in (
        ("roots-1", "Roots in every step", {"update_every": 1}),
        ("roots-1-qr", "Roots in every step, by QR", {"update_every": 1, "tracking": "qr", "bound": 0.3}),
        ("roots-1-newton", "Roots in every step, by Newton", {"update_every": 1, "tracking": "newton", "bound": 0.1}),
        ("roots-1-coupled", "Roots in every step, coupled", {"update_every": 1, "tracking": "coupled", "bound": 0.1}),
        ("roots-2", "Roots every 2 steps", {"update_every": 2}),
        ("roots-5", "Roots every 5 steps", {"update_every": 5}),
        ("roots-10", "Roots every 10 steps", {"update_every": 10}),
        ("roots-20", "Roots every 20 steps", {"update_every": 20}),
        ("roots-5-damped", "Roots every 5 steps, more damping", {"update_every": 5, "damping": 0.01}),
        ("roots-5-rms1", "Roots every 5 steps, more damping, larger steps", {"damping": 0.01, "max_rms": 1.0}),
        ("roots-5-decay", "Roots every 5 steps, damping decays", {"update_every": 5, "decay": True}),
        (
            "roots-5-tables",
            "Roots every 5 steps, damping decays, Adam for tables",
            {"decay": True, "adam_tables": True},
        ),
        ("roots-5-lazy", "Roots every 5 steps, from every 5th gradient", {"update_every": 5, "lazy": True}),
        ("roots-5-sample", "Roots every 5 steps, begun per sample", {"update_every": 5, "sample_steps": 5}),
    )
}


def names() -> list[str]:
    return list(OPTIMIZERS)


def get(name: str) -> OptimizerEntry:
    """The entry of that name. ValueError, with the nearest name, for an unknown one."""
    if name in CANDIDATES:
        return CANDIDATES[name]
    check_name(name, OPTIMIZERS, "optimizer")
    return OPTIMIZERS[name]


def pick(text: str) -> list[str]:
    """Names with commas between, or all. What cannot be made is said here, before anything is run."""
    wanted = names() if text == "all" else list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if not wanted:
        raise ValueError("No optimizer is named: --help has their names, and all takes every one")
    for name in wanted:
        get(name).load()
    return wanted


def state_bytes(state: object) -> int:
    """The bytes of all tensors in an optimizer's state_dict."""
    if isinstance(state, Tensor):
        values = state._values() if state.is_sparse else state
        return values.numel() * values.element_size()
    if isinstance(state, Mapping):
        return sum(state_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(state_bytes(value) for value in state)
    return 0
