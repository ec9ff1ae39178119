"""Measures the peak memory of a step with a refresh beyond that of a step of SGD, by torch's profiler.

    python tools/refresh_memory.py             the large cases of the tests, for three bounds
    python tools/refresh_memory.py --all       and the 97 architectures of docs/architectures.md
    python tools/refresh_memory.py graph       some of the cases

The optimizer's state is in the number. Needs the extra ``ngplus[dev]``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ngplus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from architectures.cases import ARCHITECTURES, Architecture
from architectures.measure import call, loss_of, weights_of
from helpers.memory import CASES, WAITING, Built, one_pass, peak_bytes, refresh_bytes

MEGA = 2**20
BOUNDS = (16, 50, 1024)  # MB
MODULES = ("text", "vision", "graphs", "diffusion", "adapters")


def graph() -> Built:
    """A GCN of 17,802 parameters on 40,000 nodes, each of which counts as a sample."""
    from torch_geometric.nn import GCNConv, Sequential

    nodes = 40_000
    layers: Any = [(GCNConv(128, 128), "x, e -> x"), nn.ReLU(), (GCNConv(128, 10), "x, e -> x")]
    return (
        Sequential("x, e", layers),
        (torch.randn(nodes, 128), torch.randint(nodes, (2, 5 * nodes))),
        {"sample_index": lambda x, edges: torch.arange(len(x))},
    )


class Logits(nn.Module):
    """The logits of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def mixtral() -> Built:
    """A small Mixtral on 16 texts of 128 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    return Logits(MixtralForCausalLM(config)), (torch.randint(512, (16, 128)),), {}


LARGE = {**CASES, "graph": graph, "mixtral": mixtral}
LOOPS = {**{name: (case, one_pass) for name, case in LARGE.items()}, **WAITING}


def of_architecture(architecture: Architecture, memory: int) -> tuple[int, int, ngplus.NGPlus]:
    """The peaks of SGD and of NGPlus, and that optimizer, for a model of the tests."""
    torch.manual_seed(0)
    case = architecture.build()
    outputs = case.outputs(call(case.model, case.batch))
    weights, count = weights_of(outputs), len(outputs[0])
    del outputs

    def step(optimizer: torch.optim.Optimizer) -> None:
        loss_of(case.outputs(call(case.model, case.batch)), weights).div(count).backward()
        optimizer.step()

    plain = peak_bytes(lambda: step(torch.optim.SGD(case.model.parameters(), lr=0.0)))
    case.model.zero_grad()
    optimizer = ngplus.NGPlus(case.model, lr=0.0, damping=1.0, refresh_memory=memory, **case.options)
    return plain, peak_bytes(lambda: step(optimizer)), optimizer


def state_bytes(optimizer: ngplus.NGPlus) -> int:
    tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(LOOPS))
    parser.add_argument("--all", action="store_true", help="measure the architectures, too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("MB of a step of SGD, and beyond it of a step with a refresh, for refresh_memory of", *BOUNDS, "MB")
    for name in asked.cases:
        row = []
        for bound in BOUNDS:
            case, loop = LOOPS[name]
            plain, peak, optimizer = refresh_bytes(case, bound * MEGA, loop)
            plan = optimizer.plan()
            large = sum("refresh_memory" in each.note for each in plan)
            row.append(f"{(peak - plain) / MEGA:.1f}" + (f", {large} of {len(plan)} mini-batch" if large else ""))
        print(" | ".join(["", name, f"{plain / MEGA:.1f}", *row, ""]).strip(), flush=True)
    if asked.all:
        architectures()


def architectures() -> None:
    for module in MODULES:
        importlib.import_module(f"architectures.{module}")
    most = []
    for name, architecture in ARCHITECTURES.items():
        plain, peak, optimizer = of_architecture(architecture, 1024 * MEGA)
        most.append((peak - plain, name))
        print(
            f"{name}: {plain / MEGA:.2f} MB, {(peak - plain) / MEGA:.2f} beyond it, "
            f"{state_bytes(optimizer) / MEGA:.2f} of state",
            flush=True,
        )
    largest, name = max(most)
    print(f"{len(most)} architectures, at most {largest / MEGA:.2f} MB beyond SGD ({name})")


if __name__ == "__main__":
    main()
