"""Measures the peak memory of a step with a refresh against that of SGD, each in a process of its own.

    python tools/refresh_memory.py

The size of a process counts, so that weights, activations and the state are in both numbers.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ngplus

Loss = Callable[[], Tensor]


class Own(nn.Module):
    """A module without a layer rule."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def graph() -> tuple[nn.Module, Loss]:
    """A GCN of 17,802 parameters on 40,000 nodes, each of which counts as a sample."""
    from torch_geometric.nn import GCNConv, Sequential

    nodes = 40_000
    x, edges, y = torch.randn(nodes, 128), torch.randint(nodes, (2, 5 * nodes)), torch.randint(10, (nodes,))
    layers: Any = [(GCNConv(128, 128), "x, e -> x"), nn.ReLU(), (GCNConv(128, 10), "x, e -> x")]
    model = Sequential("x, e", layers)
    return model, lambda: F.cross_entropy(model(x, edges), y)


def unknown() -> tuple[nn.Module, Loss]:
    """Modules without a rule, 512 x 512, with 1,024 samples."""
    model = nn.Sequential(Own(512), nn.ReLU(), Own(512), nn.ReLU(), nn.Linear(512, 10))
    x, y = torch.randn(1024, 512), torch.randint(10, (1024,))
    return model, lambda: F.cross_entropy(model(x), y)


def mixtral() -> tuple[nn.Module, Loss]:
    """A small Mixtral on 16 texts of 128 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    )
    ids = torch.randint(512, (16, 128))
    return model, lambda: model(input_ids=ids, labels=ids).loss


CASES = {"graph": graph, "unknown": unknown, "mixtral": mixtral}


def one_step(case: str, refresh: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model, loss = CASES[case]()
    optimizer: Any = ngplus.NGPlus(model, lr=1e-4) if refresh else torch.optim.SGD(model.parameters(), lr=1e-4)
    loss().backward()
    optimizer.step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--step", choices=("sgd", "refresh"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.step:
        one_step(asked.cases[0], asked.step == "refresh")
        return
    for case in asked.cases:
        command = [sys.executable, __file__, case, "--step"]
        runs = [subprocess.run([*command, step], check=True, capture_output=True) for step in ("sgd", "refresh")]
        plain, refresh = (float(run.stdout.split()[-1]) for run in runs)
        print(f"{case}: {plain:.2f} GiB with SGD, {refresh:.2f} GiB with a refresh", flush=True)


if __name__ == "__main__":
    main()
