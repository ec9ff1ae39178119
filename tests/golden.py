"""Golden values: small models, each trained for 30 steps by one configuration, and numbers that tell its parameters.

    python tests/golden.py --check             # compares bit for bit with tests/golden.json
    python tests/golden.py --write             # writes that file anew, after a change that is meant
    python tests/golden.py --check conv graft  # the configurations whose names contain one of these words

The file has a digest of the parameters' bytes, which holds on one machine, and two sums of their entries, which hold
everywhere within rounding. ``test_golden.py`` compares the sums.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ngplus
from helpers import steps
from helpers.ranks import Pool

FILE = Path(__file__).with_suffix(".json")
STEPS, BATCH = 30, 12
Batch = tuple[Any, ...]

# ------------------------------------------------------------------------------------------------ models


class Seeded:
    """Draws the batch of a step: floats, or indices below ``top``."""

    def __init__(self, *shape: int, top: int = 0) -> None:
        self.shape, self.top = shape, top

    def __call__(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        if self.top:
            return torch.randint(self.top, (BATCH, *self.shape), generator=generator)
        return torch.randn(BATCH, *self.shape, generator=generator, dtype=torch.float64)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3), nn.GroupNorm(2, 6),
        nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


def sequence() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Tanh(), nn.ConvTranspose1d(8, 4, 2), nn.Flatten(), nn.LazyLinear(3))


def volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, 2), nn.Tanh(), nn.ConvTranspose3d(4, 2, 2), nn.Flatten(), nn.LazyLinear(3))


class Transformer(nn.Module):
    """An embedding whose weight is also the output layer's, attention, layer norm and a feed-forward part."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(4, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.table(tokens) + self.places)).mean(1)[:, :3]
        return out


class Recurrent(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        out: Tensor = self.head(x)
        return out


class Tables(nn.Module):
    """A lookup, a bag, and a layer after them."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.one, self.bag = nn.Embedding(13, 4, sparse=sparse), nn.EmbeddingBag(13, 4, mode="sum", sparse=sparse)
        self.head = nn.Linear(8, 3)

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.one(index[:, 0]), self.bag(index)], 1))
        return out


class Unknown(nn.Module):
    """A module of a class that no rule knows, and a parameter of the root's own."""

    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.left) * (x @ self.right)

    def __init__(self) -> None:
        super().__init__()
        self.own, self.scale, self.head = self.Bilinear(), nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.own(x) * self.scale)
        return out


class Graphs(nn.Module):
    """Rows of several samples in one dimension; ``sample_index`` tells which."""

    index = torch.arange(BATCH).repeat_interleave(torch.arange(BATCH) % 3 + 1)

    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.node(x[self.index]))
        out: Tensor = self.head(rows.new_zeros(BATCH, 5).index_add(0, self.index, rows))
        return out


# ------------------------------------------------------------------------------------------------ configurations


@dataclass(frozen=True)
class Config:
    """One training: the optimizer's options, the model and its batches, and how it is trained."""

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = mlp
    inputs: Seeded = field(default_factory=lambda: Seeded(6))
    train: str = "plain"
    make: Callable[..., Any] = ngplus.NGPlus
    dtype: torch.dtype = torch.float64


PAPER: dict[str, Any] = {**steps.PAPER, "lr": 0.05, "damping": 0.3, "update_every": 4}
IMAGES, TOKENS = Seeded(2, 6, 6), Seeded(4, top=11)


def paper(**options: Any) -> dict[str, Any]:
    return {**PAPER, **options}


class Preconditioned(torch.optim.SGD):
    """SGD behind a preconditioner."""

    def __init__(self, model: nn.Module, lr: float, **options: Any) -> None:
        super().__init__(model.parameters(), lr=lr, momentum=0.9)
        self.preconditioner = ngplus.Preconditioner(model, **options)

    def step(self, closure: Any = None) -> Any:
        self.preconditioner.step()
        return super().step(closure)


CONFIGS: dict[str, Config] = {
    # layers
    "linear": Config(paper()),
    "convolutions": Config(paper(), convolutions, IMAGES),
    "conv1d": Config(paper(), sequence, Seeded(3, 7)),
    "conv3d": Config(paper(), volume, Seeded(2, 4, 3, 3)),
    "transformer": Config(paper(), lambda: Transformer(tied=False), TOKENS),
    "tied": Config(paper(), Transformer, TOKENS),
    "recurrent": Config(paper(), Recurrent),
    "tables": Config(paper(), Tables, Seeded(5, top=13)),
    "sparse tables": Config(paper(), lambda: Tables(sparse=True), Seeded(5, top=13)),
    "unknown module": Config(paper(), Unknown),
    "sample index": Config(paper(sample_index=lambda x: Graphs.index), Graphs),
    # curvature
    "momentum": Config(paper(curvature="momentum", beta=0.8), convolutions, IMAGES),
    "batch": Config(paper(curvature="batch", beta=0.9, gamma=0.1)),
    "samples": Config(paper(samples=0.5), convolutions, IMAGES),
    "sum": Config(paper(loss_reduction="sum", lr=0.01), train="sum"),
    # sides, solvers, blocks, sketches
    "left": Config(paper(side="left"), convolutions, IMAGES),
    "right": Config(paper(side="right"), convolutions, IMAGES),
    "dense": Config(paper(solver="dense"), lambda: nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3))),
    "woodbury": Config(paper(solver="woodbury"), lambda: nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3))),
    "sketched solver": Config(paper(solver="sketched", damping=1.0)),
    "blocks": Config(paper(block_size=2), convolutions, IMAGES),
    "sketch uniform": Config(paper(sketch=4)),
    "sketch gaussian": Config(paper(sketch={"size": 4, "kind": "gaussian"})),
    "countsketch": Config(paper(sketch={"size": 4, "kind": "countsketch"})),
    "srht": Config(paper(sketch={"size": 4, "kind": "srht"})),
    "graft sgd": Config(paper(graft="sgd", lr=0.005), convolutions, IMAGES),
    "graft adam": Config(paper(graft="adam", lr=0.01)),
    # the update
    "momentum and decay": Config(paper(momentum=0.8, weight_decay=0.01, nesterov=True)),
    "maximize": Config(paper(maximize=True, lr=0.005)),
    "float32": Config(paper(), convolutions, IMAGES, dtype=torch.float32),
    # training loops
    "accumulation": Config(paper(), train="accumulation"),
    "autocast": Config(paper(), train="autocast", dtype=torch.float32),
    "loss scale": Config(paper(), train="loss scale", dtype=torch.float32),
    "resume": Config(paper(curvature="momentum"), train="resume"),
    "two ranks": Config(paper(), train="two ranks"),
    "two ranks, memory": Config(paper(distribution="memory", curvature="momentum"), train="two ranks"),
    "fsdp2": Config(paper(), train="fsdp2"),
    # other optimizers
    "kfac": Config({"lr": 0.05, "damping": 0.3, "update_every": 4}, convolutions, IMAGES, make=ngplus.baselines.KFAC),
    "seng": Config({"lr": 0.05, "damping": 0.3, "update_every": 4}, convolutions, IMAGES, make=ngplus.baselines.SENG),
    "preconditioner": Config(paper(), make=Preconditioned),
    # NGAdam
    "ngadam": Config({"lr": 0.02}, make=ngplus.NGAdam),
    "ngadam convolutions": Config({"lr": 0.02}, convolutions, IMAGES, make=ngplus.NGAdam),
    "ngadam tied": Config({"lr": 0.02}, Transformer, TOKENS, make=ngplus.NGAdam),
    "ngadam sparse": Config(
        {"lr": 0.02, "weight_decay": 0.0}, lambda: Tables(sparse=True), Seeded(5, top=13), make=ngplus.NGAdam
    ),
    "ngadam two ranks": Config({"lr": 0.02}, train="two ranks", make=ngplus.NGAdam),
    "ngadam fsdp2": Config({"lr": 0.02}, train="fsdp2", make=ngplus.NGAdam),
    # the defaults of NGPlus
    "defaults": Config({"lr": 0.05}),
    "defaults, convolutions": Config({"lr": 0.05}, convolutions, IMAGES),
}
IN_RANKS = ("two ranks", "fsdp2")

# ------------------------------------------------------------------------------------------------ training


def parameters(config: Config, rank: int = 0, world: int = 1) -> list[Tensor]:
    """After all steps."""
    torch.manual_seed(0)
    model = config.model().to(config.dtype)
    with torch.no_grad():
        model(cast(config.inputs(0), config.dtype))  # lazy modules get their sizes
    if config.train == "two ranks":
        model = DistributedDataParallel(model)
    elif config.train == "fsdp2":
        model = shard(model)
    optimizer = config.make(model, **config.options)
    for step in range(STEPS):
        if config.train == "resume" and step == STEPS // 2 + 1:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = config.make(model, **config.options)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        x = cast(config.inputs(step), config.dtype)
        y = Seeded(3)(step + 1000).to(config.dtype)
        backward(config, model, x[rank::world], y[rank::world], optimizer)
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def backward(config: Config, model: nn.Module, x: Tensor, y: Tensor, optimizer: Any) -> None:
    """The passes of a step, and the step."""
    reduction = "sum" if config.train == "sum" else "mean"
    parts = 3 if config.train == "accumulation" else 1
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if config.train == "loss scale" else None
    for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.train in ("autocast", "loss scale")):
            loss = F.mse_loss(model(part[0]).to(config.dtype), part[1], reduction=reduction) / parts
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def on_rank(rank: int, world: int, name: str) -> list[Tensor]:
    return parameters(CONFIGS[name], rank, world)


def summary(tensors: list[Tensor]) -> dict[str, Any]:
    """Two sums of the entries, with weights that tell their places, and a digest of their bytes."""
    flat = torch.cat([t.flatten().double() for t in tensors])
    weights = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]
    return {"squares": flat.square().sum().item(), "weighted": (flat * weights).sum().item(), "digest": digest}


def run(name: str, ranks: Callable[[int], Pool]) -> dict[str, Any]:
    config = CONFIGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ranks(2).run(on_rank, name)[0] if config.train in IN_RANKS else parameters(config)
    return summary(found)


def tolerance(config: Config) -> float:
    """Relative, of the sums: between machines, whose products round differently."""
    if config.train in ("autocast", "loss scale"):
        return 5e-2
    return 1e-6 if config.dtype == torch.float64 else 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in CONFIGS if not asked.words or any(word in name for word in asked.words)]
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(2, Path(folder)) if any(CONFIGS[name].train in IN_RANKS for name in names) else None
        found = {name: run(name, lambda world: pool) for name in names}  # type: ignore[arg-type, return-value]
        if pool is not None:
            pool.close()
    for name, values in found.items():
        if values["digest"] != stored.get(name, {}).get("digest"):
            old = stored.get(name, {})
            moved = max((abs(values[k] - old[k]) / abs(old[k]) for k in ("squares", "weighted") if k in old), default=1)
            print(f"{name}: {'relative change ' + format(moved, '.1e') if old else 'new'}")
    if asked.write:
        FILE.write_text(json.dumps({**stored, **found}, indent=1) + "\n")
    elif asked.check:
        sys.exit(int(any(values != stored.get(name) for name, values in found.items())))


if __name__ == "__main__":
    main()
