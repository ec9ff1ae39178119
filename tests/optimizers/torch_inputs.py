"""What torch's own test_optim.py takes: settings of NGPlus and NGAdam, learning-rate schedulers, and bad inputs.

``INFOS`` has the OptimizerInfo that torch keeps for each of its optimizers.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, PolynomialLR, ReduceLROnPlateau, StepLR

from helpers.steps import PAPER
from ngplus import NGAdam, NGPlus

pytest.importorskip("numpy", reason="torch's testing tools import it")
# torch's testing tools load a hypothesis profile of 10 examples and freeze torch.backends, for the whole process.
profile, frozen = hypothesis.settings.get_current_profile_name(), torch.backends.__allow_nonbracketed_mutation_flag
from torch.testing._internal.common_optimizers import (  # noqa: E402
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    get_error_inputs_for_all_optims,
)

hypothesis.settings.load_profile(profile)
torch.backends.__allow_nonbracketed_mutation_flag = frozen


def ngplus_inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
    """Each curvature with each graft, then the other options one by one."""
    inputs = []
    for curvature in ("sample", "momentum", "batch"):
        for graft in (None, "sgd", "adam"):
            kwargs = {"lr": 1e-3, "curvature": curvature, "graft": graft, "update_every": 2}
            inputs.append(OptimizerInput(None, kwargs, f"{curvature} {graft}"))
    inputs.append(OptimizerInput(None, {}, "default"))
    plain = {"lr": 0.01, "graft": "sgd"}
    for desc, more in {
        "tensor lr": {"lr": torch.tensor(0.01)},
        "weight_decay": {"weight_decay": 0.1},
        "weight_decay batch": {"weight_decay": 0.1, "curvature": "batch"},
        "maximize": {"maximize": True, "weight_decay": 0.1},
        "no momentum": {"momentum": 0.0},
        "nesterov": {"nesterov": True},
        "nesterov adam": {"nesterov": True, "graft": "adam", "lr": 1e-3},
        "the paper": {**PAPER, "lr": 1e-3, "momentum": 0.0, "damping": 0.1, "update_every": 1},
        "woodbury": {"solver": "woodbury", "curvature": "sample", "block_size": 3},
        "sketched": {"solver": "sketched", "curvature": "sample", "samples": 3},
    }.items():
        inputs.append(OptimizerInput(None, {**plain, **more}, desc))
    return inputs


def ngadam_inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
    """The options one by one."""
    return [
        OptimizerInput(None, kwargs, f"NGAdam {desc}")
        for desc, kwargs in {
            "default": {},
            "small lr": {"lr": 1e-3, "update_every": 2},
            "tensor lr": {"lr": torch.tensor([0.001])},
            "betas": {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6},
            "no momentum": {"lr": 1e-3, "betas": (0.0, 0.95), "update_every": 1},
            "weight_decay": {"lr": 1e-3, "weight_decay": 0.1},
            "maximize": {"lr": 1e-3, "maximize": True, "weight_decay": 0.1},
        }.items()
    ]


INFOS = tuple(
    OptimizerInfo(
        kind,
        optim_inputs_func=inputs,
        scheduler_inputs=(
            [lambda opt: StepLR(opt, gamma=0.9, step_size=2)],
            [
                lambda opt: StepLR(opt, gamma=0.9, step_size=2),
                lambda opt: ReduceLROnPlateau(opt, patience=0, threshold=10),
            ],
            [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4), lambda opt: ExponentialLR(opt, gamma=0.99)],
            [lambda opt: PolynomialLR(opt, total_iters=20, power=1.2)],
        ),
        supported_impls=(),
        supports_complex=False,
    )
    for kind, inputs in ((NGPlus, ngplus_inputs), (NGAdam, ngadam_inputs))
)


class Setting(NamedTuple):
    """One of the settings to test, with its optimizer."""

    kind: type[NGPlus | NGAdam]
    kwargs: dict[str, Any]
    desc: str


INPUTS = [
    Setting(info.optim_cls, optim_input.kwargs, optim_input.desc)
    for info in INFOS
    for optim_input in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
]


ERRORS = get_error_inputs_for_all_optims("cpu", torch.float32)
every_input = pytest.mark.parametrize("optim_input", INPUTS, ids=lambda optim_input: optim_input.desc)


FIRST = [next(optim_input for optim_input in INPUTS if optim_input.kind is info.optim_cls) for info in INFOS]


each_optimizer = pytest.mark.parametrize("optim_input", FIRST, ids=lambda optim_input: optim_input.kind.__name__)


BASIC_NAMES = {
    "sample None", "sample adam", "momentum None", "momentum adam", "batch None", "batch adam", "the paper",
    "NGAdam small lr", "NGAdam betas", "NGAdam no momentum",
}  # fmt: skip


BASIC = [optim_input for optim_input in INPUTS if optim_input.desc in BASIC_NAMES]


every_curvature = pytest.mark.parametrize("optim_input", BASIC, ids=lambda optim_input: optim_input.desc)


def build(optim_input: Setting, params: Any, **changes: Any) -> Any:
    """The optimizer on a model; where the curvature is the mini-batch's, on its parameters only."""
    kwargs = {**copy.deepcopy(optim_input.kwargs), **changes}
    if isinstance(params, nn.Module) and kwargs.get("curvature") == "batch" and "model" not in kwargs:
        params = params.parameters()
    return optim_input.kind(params, **kwargs)


def copies(tensors: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]
