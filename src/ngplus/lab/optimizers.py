"""The optimizers by name, with their defaults and tuning ranges.

Each class is imported on first use. The run's schedule multiplies the learning rate. One or two hyper-parameters have a
tuning range; the others are fixed to the class's defaults, with the exceptions that docs/laboratory.md lists.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from ngplus.lab.optimizer_wrappers import Trainer


@dataclass(frozen=True)
class Range:
    """The range in which a hyper-parameter is tuned, as a multiple of a unit of :mod:`ngplus.lab.search`."""

    low: float
    high: float
    log: bool = True
    unit: str = ""


# arguments that no user sets by text: the laboratory gives the first three, torchrun's processes decide the others
NOT_SET = ("params", "model", "sample_index", "process_group", "distribution")


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that the commands can train with. ``where`` is its class, ``module:name``; ``build`` is the function
    of :mod:`ngplus.lab.optimizer_builders` that makes it for a model."""

    name: str
    title: str
    where: str
    build: str
    defaults: Mapping[str, Any]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    extra: tuple[str, ...] = ()  # hyper-parameters that ``build`` takes beside those of the class
    schedule: str | None = None  # in place of the preset's

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
                f"The optimizer {self.name!r} needs {module}.{name}: {error}. Run pip install --upgrade {library!r}, "
                f"or leave {self.name} out of --optimizers"
            ) from error
        return cls

    def options(self) -> list[str]:
        """The names of its hyper-parameters."""
        parameters = inspect.signature(self.load()).parameters.values()
        return [*(p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in NOT_SET), *self.extra]

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
        build = getattr(importlib.import_module("ngplus.lab.optimizer_builders"), self.build)
        made: Trainer = build(model, self.load(), {**self.defaults, **hyper})
        return made


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """ValueError with the nearest name for one that is not known."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"There is no {what} {name!r}{hint} (known: {', '.join(known)})")


# Algorithm 1 as the paper has it; damping is absolute there, and its refreshes are 200 to 1,000 steps apart.
PAPER_FORM: dict[str, Any] = {
    "relative_damping": 0.0, "curvature": "sample", "side": "smaller", "block_size": None, "graft": None,
}  # fmt: skip
# What counts is lr / (1 - momentum): with a momentum of 0.5 the same range is 5 times as high as with 0.9.
_SGD_LR, _SGD_LR_HALF = Range(0.03, 30.0, unit="step"), Range(0.15, 150.0, unit="step")
_ADAM_LR = Range(3e-4, 1e-1)
_DAMPING = Range(1.0, 1e4, unit="eigenvalue")
_DAMPED = {"lr": Range(0.03, 100.0, unit="step * damping"), "damping": _DAMPING}
# SOAP leaves a wider side alone, Shampoo a whole matrix that has one: a table's would cost tens of AdamW's steps.
_WIDEST = 512
# the authors' learning rate, betas (0.95, 0.95, the class's) and decay
_SOAP: dict[str, Any] = {"lr": 0.003, "weight_decay": 0.01, "max_precondition_dim": _WIDEST}
_KL: dict[str, Any] = {"lr": 0.003, "weight_decay": 0.01, "precondition_frequency": 10}
_KL_RANGES = {"lr": _ADAM_LR}

OPTIMIZERS: dict[str, OptimizerEntry] = {
    entry.name: entry
    for entry in (
        OptimizerEntry(
            "sgd", "SGD with momentum", "torch.optim:SGD", "beside_sgd", {"lr": 0.1, "momentum": 0.9}, {"lr": _SGD_LR}
        ),
        OptimizerEntry(
            "adagrad", "AdaGrad", "torch.optim:Adagrad", "of_parameters", {"lr": 0.03}, {"lr": Range(1e-3, 0.3)}
        ),
        OptimizerEntry("adam", "Adam", "torch.optim:Adam", "beside_sparse_adam", {"lr": 0.003}, {"lr": _ADAM_LR}),
        OptimizerEntry(
            "adamw",
            "AdamW",
            "torch.optim:AdamW",
            "beside_sparse_adam",
            {"lr": 0.003, "weight_decay": 0.01},
            {"lr": _ADAM_LR},
        ),
        OptimizerEntry(
            "muon",
            "Muon",
            "torch.optim:Muon",
            "muon",
            # match_rms_adamw: the learning rate is like Adam's (Liu et al., Muon is scalable for LLM training, 2025).
            # The AdamW beside Muon has a rate of its own in K. Jordan's code, and Muon's where adamw_lr is not given.
            {"lr": 0.003, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"},
            {"lr": _ADAM_LR, "adamw_lr": _ADAM_LR},
            extra=("adamw_lr",),
        ),
        OptimizerEntry(
            "lars",
            "LARS",
            "pytorch_optimizer:LARS",
            "beside_sgd",
            {"lr": 1.0, "momentum": 0.9, "trust_coefficient": 0.01},
            {"lr": Range(3e-2, 30.0)},
        ),
        OptimizerEntry(
            "shampoo",
            "Shampoo",
            "pytorch_optimizer:ScalableShampoo",
            "shampoo",
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
            "beside_sparse_adam",
            {**_SOAP, "precondition_frequency": 10},
            {"lr": _ADAM_LR},
        ),
        # the best form in the authors' comparison of frequencies (Vyas et al., SOAP, 2024)
        OptimizerEntry(
            "soap-1",
            "SOAP, basis in every step",
            "pytorch_optimizer:SOAP",
            "beside_sparse_adam",
            {**_SOAP, "precondition_frequency": 1},
            {"lr": _ADAM_LR},
        ),
        # Lin et al., Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization, 2025
        OptimizerEntry(
            "kl-soap", "KL-SOAP", "heavyball:KLSOAP", "from_heavyball", {**_KL, "max_precond_dim": _WIDEST}, _KL_RANGES
        ),
        OptimizerEntry(
            "kl-shampoo",
            "KL-Shampoo",
            "heavyball:KLShampoo",
            "from_heavyball",
            {**_KL, "max_precond_dim": _WIDEST},
            _KL_RANGES,
        ),
        # E. Walters' kron_torch: a learning rate of about a third of Adam's; the preconditioner's rate is 0.1
        OptimizerEntry(
            "psgd",
            "PSGD Kron",
            "heavyball:PSGDKron",
            "from_heavyball",
            {"lr": 0.001, "weight_decay": 0.01, "max_size_triangular": _WIDEST},
            {"lr": Range(1e-4, 3e-2)},
        ),
        # Frans et al., A Stable Whitening Optimizer, 2025: rates of about 0.2, weights averaged over 1 / (1 - ema_rate)
        # steps. Their 0.999 is for runs of 10,000 steps and more. A step decays a matrix by lr * 2 / (m + n) *
        # weight_decay, so that its weight_decay is tuned.
        OptimizerEntry(
            "splus",
            "SPlus",
            "pytorch_optimizer:SPlus",
            "splus",
            {"lr": 0.2, "weight_decay": 0.01, "ema_rate": 0.99, "max_dim": _WIDEST},
            {
                "lr": Range(1e-2, 1.0),
                "ema_rate": Range(0.9, 0.999, log=False),
                "weight_decay": Range(1e-3, 1.0),
            },
        ),
        # Defazio et al., The Road Less Scheduled, 2024: no schedule but the warm-up, rates of 1 to 10 times AdamW's,
        # beta1 0.9 to 0.98
        OptimizerEntry(
            "schedule-free",
            "Schedule-free AdamW",
            "pytorch_optimizer:ScheduleFreeAdamW",
            "schedule_free",
            {"lr": 0.01, "weight_decay": 0.01, "beta1": 0.9},
            {"lr": Range(1e-3, 3e-1), "beta1": Range(0.8, 0.98, log=False)},
            extra=("beta1",),
            schedule="constant",
        ),
        # Pagliardini et al., The AdEMAMix Optimizer, 2024: alpha 4 to 10. Their beta3 of 0.9999 averages over more
        # steps than these runs have.
        OptimizerEntry(
            "ademamix",
            "AdEMAMix",
            "pytorch_optimizer:AdEMAMix",
            "beside_sparse_adam",
            {"lr": 0.003, "weight_decay": 0.01, "betas": (0.9, 0.999, 0.999), "alpha": 5.0, "weight_decouple": True},
            {"lr": _ADAM_LR, "alpha": Range(1.0, 10.0)},
        ),
        OptimizerEntry(
            "kfac",
            "KFAC",
            "ngplus.baselines:KFAC",
            "ngplus",
            {"lr": 0.1, "momentum": 0.5, "damping": 0.1, "update_every": 10},
            {"lr": Range(0.15, 500.0, unit="step * damping"), "damping": _DAMPING},
        ),
        OptimizerEntry(
            "seng",
            "SENG",
            "ngplus.baselines:SENG",
            "ngplus",
            # columns of U: SchNet has thousands of rows a batch, and U^T U is inverted
            {"lr": 0.1, "momentum": 0.9, "damping": 0.3, "update_every": 10, "samples": 256},
            _DAMPED,
        ),
        OptimizerEntry(
            "ngplus",
            "NG+",
            "ngplus:NGPlus",
            "ngplus",
            {"lr": 0.5, "momentum": 0.5, "relative_damping": 1.0},
            {"lr": _SGD_LR_HALF, "relative_damping": Range(0.03, 10.0)},
        ),
        OptimizerEntry(
            "ngplus-paper",
            "NG+, the paper's form",
            "ngplus:NGPlus",
            "ngplus",
            {**PAPER_FORM, "lr": 0.1, "momentum": 0.9, "damping": 0.3, "update_every": 10},
            _DAMPED,
        ),
        OptimizerEntry("ngadam", "NGAdam", "ngplus:NGAdam", "of_model", {"lr": 0.005}, {"lr": _ADAM_LR}),
    )
}


# Forms of NGAdam before one was chosen, for tools/standard_runs.py. The commands take them, too, and do not list them.
_ROOTS = "ngplus.lab.candidates:Roots"
CANDIDATES: dict[str, OptimizerEntry] = {
    name: OptimizerEntry(name, title, _ROOTS, "of_model", {"lr": 0.005, **hyper}, {"lr": _ADAM_LR})
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
    """Names separated by commas, or all. Raises an error for those that cannot be made, before anything is run."""
    wanted = names() if text == "all" else list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if not wanted:
        raise ValueError("No optimizer is named: see --help for the names, or use all")
    for name in wanted:
        get(name).load()
    return wanted
