"""Random configurations of models, options, data and faults: each outcome is a right result or a documented error.

    python tools/reliability/configurations.py --examples 10000

Right means: every parameter is finite, and a run that is saved after two steps, loaded (``weights_only``) into a new
model and optimizer and gone on with ends in the same bits as the run that was not.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ngplus

MODELS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "wide": lambda: nn.Sequential(nn.Linear(6, 40, bias=False), nn.ReLU(), nn.Linear(40, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "one": lambda: nn.Linear(6, 1),
}
FAULTS = ("none", "none", "none", "nan", "inf", "huge", "tiny", "zero", "one sample", "spread")


def numbers(*common: float) -> st.SearchStrategy[float]:
    return st.one_of(st.sampled_from(common), st.floats(allow_nan=True, allow_infinity=True, width=32))


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "lr": numbers(1e-3, 1e-2, 0.1),
        "momentum": numbers(0.0, 0.9),
        "nesterov": st.booleans(),
        "weight_decay": numbers(0.0, 1e-4, 0.1),
        "damping": numbers(0.0, 1e-8, 0.3),
        "relative_damping": numbers(0.0, 0.1),
        "update_every": st.integers(-1, 4),
        "curvature": st.sampled_from(["sample", "momentum", "batch"]),
        "beta": numbers(0.0, 0.9, 1.0),
        "gamma": numbers(0.1),
        "samples": st.one_of(st.none(), st.integers(0, 9), numbers(0.5)),
        "side": st.sampled_from(["smaller", "left", "right"]),
        "solver": st.sampled_from(["auto", "dense", "woodbury", "sketched"]),
        "block_size": st.one_of(st.none(), st.integers(0, 7)),
        "sketch": st.one_of(st.none(), st.integers(0, 9)),
        "graft": st.sampled_from([None, "sgd", "adam"]),
        "loss_reduction": st.sampled_from(["mean", "sum"]),
        "maximize": st.booleans(),
        "seed": st.integers(0, 5),
    },
)
CASES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "double": st.booleans(),
        "batch": st.integers(1, 7),
        "fault": st.sampled_from(FAULTS),
        "at": st.integers(0, 3),
        "options": OPTIONS,
    }
)


def batch(case: dict[str, Any], k: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(case["batch"], 6, generator=torch.Generator().manual_seed(k)).to(dtype)
    fault = case["fault"] if k == case["at"] else "none"
    if fault in ("nan", "one sample"):
        (x if fault == "nan" else x[:1]).fill_(math.nan)
    elif fault == "inf":
        x[0, 0] = math.inf
    elif fault in ("huge", "tiny", "zero"):
        x *= {"huge": 1e18, "tiny": 1e-18, "zero": 0.0}[fault]
    elif fault == "spread":
        x *= torch.logspace(-10, 10, 6, dtype=dtype)
    return x


def steps(model: nn.Module, optimizer: Any, case: dict[str, Any], which: range, dtype: torch.dtype) -> None:
    for k in which:
        optimizer.zero_grad()
        model(batch(case, k, dtype)).square().mean().backward()
        optimizer.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters()), "a parameter is not finite"


def outcome(case: dict[str, Any]) -> str:
    """One of "right", "right, with faults put right" and "refused"; AssertionError for anything else."""
    dtype = torch.float64 if case["double"] else torch.float32
    torch.manual_seed(0)
    model = MODELS[case["model"]]().to(dtype)
    other = copy.deepcopy(model)
    try:
        optimizer = ngplus.NGPlus(model, **case["options"])
    except ValueError:  # bad options are refused when the optimizer is made
        return "refused"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps(model, optimizer, case, range(4), dtype)
        first = ngplus.NGPlus(other, **case["options"])
        steps(other, first, case, range(2), dtype)
        kept = io.BytesIO()
        torch.save([other.state_dict(), first.state_dict()], kept)
        kept.seek(0)
        held = torch.load(kept, weights_only=True)
        third = MODELS[case["model"]]().to(dtype)
        third.load_state_dict(held[0])
        second = ngplus.NGPlus(third, **case["options"])
        second.load_state_dict(held[1])
        steps(third, second, case, range(2, 4), dtype)
    for a, b in zip(model.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b), "a run that was saved and loaded ends elsewhere"
    return "right, with faults put right" if not optimizer.health().good else "right"


def try_many(examples: int) -> Counter[str]:
    """How often each outcome was seen. The first failure is made as small as it gets, and raised."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(CASES)
    def trial(case: dict[str, Any]) -> None:
        seen[outcome(case)] += 1

    trial()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    print(json.dumps(try_many(parser.parse_args().examples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
