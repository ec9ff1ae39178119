"""SchNet of torch_geometric on neighbour lists that are made here, and the task of fitting energies with it.

Samples and rows. The model sees all atoms of a batch in one tensor, and all pairs of neighbours in another: layers on
atoms and the embedding have one row for each atom, the filter networks one for each pair. ``sample_index`` tells NGPlus
of which molecule or crystal each is, so these are its samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn.models import SchNet

from ngplus.lab.workloads.base import Preset, Task
from ngplus.lab.workloads.recipe import Recipe
from ngplus.lab.workloads.sampling import batch_index, device_of, evaluating


class EnergySchNet(SchNet):  # type: ignore[misc]
    """torch_geometric's SchNet, given the neighbour lists; the output is the sum of the atoms' shares for each of the
    structures."""

    def __init__(self, **config: Any) -> None:
        super().__init__(interaction_graph=nn.Identity(), **config)

    def forward(self, numbers: Tensor, edges: Tensor, distances: Tensor, structure: Tensor, structures: int) -> Tensor:
        h = self.embedding(numbers)
        expanded = self.distance_expansion(distances)
        for interaction in self.interactions:
            h = h + interaction(h, edges, distances, expanded)
        shares = self.lin2(self.act(self.lin1(h))).squeeze(1)
        return shares.new_zeros(structures).index_add(0, structure, shares)

    @staticmethod
    def sample_index(numbers: Tensor, edges: Tensor, distances: Tensor, structure: Tensor, structures: int) -> Any:
        """The structure of each atom, and of each pair."""
        return structure, structure[edges[1]]


class Graphs(NamedTuple):
    """A batch: atoms, ordered pairs of neighbours (from, to) and their distances, and the energies."""

    numbers: Tensor
    edges: Tensor
    distances: Tensor
    structure: Tensor  # of each atom
    target: Tensor  # of each structure, eV

    def to(self, device: torch.device) -> Graphs:
        return Graphs(*(tensor.to(device) for tensor in self))


def ragged(first: Tensor, count: Tensor) -> Tensor:
    """The numbers first[k], first[k] + 1, ..., first[k] + count[k] - 1, for each k in turn."""
    shift = first - (count.cumsum(0) - count)
    return torch.repeat_interleave(shift, count) + torch.arange(int(count.sum()))


class Structures(ABC):
    """Molecules or crystals, one behind the other."""

    def __init__(self, count: Tensor, numbers: Tensor, target: Tensor) -> None:
        self.count, self.numbers, self.target = count, numbers, target
        self.first = count.cumsum(0) - count

    def __len__(self) -> int:
        return len(self.count)

    @abstractmethod
    def neighbours(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs and distances within the chosen structures, atoms numbered from 0."""

    def batch(self, index: Tensor) -> Graphs:
        count = self.count[index]
        atoms = ragged(self.first[index], count)
        edges, distances = self.neighbours(index)
        structure = torch.repeat_interleave(torch.arange(len(index)), count)
        return Graphs(self.numbers[atoms], edges, distances, structure, self.target[index])


class Molecules(Structures):
    """Neighbours by all distances of the batch's molecules, made for each batch: all of them would take much memory."""

    def __init__(self, count: Tensor, numbers: Tensor, target: Tensor, positions: Tensor, cutoff: float) -> None:
        super().__init__(count, numbers, target)
        self.positions, self.cutoff = positions, cutoff

    def neighbours(self, index: Tensor) -> tuple[Tensor, Tensor]:
        count = self.count[index]
        there = torch.arange(int(count.max())) < count[:, None]  # [molecule, place]
        padded = torch.zeros(*there.shape, 3)
        padded[there] = self.positions[ragged(self.first[index], count)]
        distance = (padded[:, :, None] - padded[:, None]).square().sum(3).sqrt()
        near = there[:, :, None] & there[:, None] & (distance < self.cutoff)
        near.diagonal(dim1=1, dim2=2).fill_(False)
        which, to, source = near.nonzero(as_tuple=True)
        start = (count.cumsum(0) - count)[which]
        return torch.stack([start + source, start + to]), distance[near]


class Crystals(Structures):
    """Neighbours across periodic boundaries, worked out once."""

    def __init__(self, count: Tensor, numbers: Tensor, target: Tensor, pairs: Tensor, edges: Tensor, d: Tensor) -> None:
        super().__init__(count, numbers, target)
        self.pairs, self.edges, self.distances = pairs, edges, d  # pairs of each crystal; edges count from its 0
        self.first_pair = pairs.cumsum(0) - pairs

    def neighbours(self, index: Tensor) -> tuple[Tensor, Tensor]:
        count, pairs = self.count[index], self.pairs[index]
        chosen = ragged(self.first_pair[index], pairs)
        start = torch.repeat_interleave(count.cumsum(0) - count, pairs)
        return self.edges[:, chosen] + start, self.distances[chosen]


class EnergyTask(Task):
    """Squared error of energies, shifted by the training set's mean for each atom and divided by its spread.

    ``intensive``: the target is an energy for each atom (the mean of the atoms' shares), not their sum.
    With the option ``loss_unit="eV"`` the loss is in eV^2, as in SchNetPack.
    """

    def __init__(self, structures: Structures, train: Tensor, val: Tensor, preset: Preset, intensive: bool) -> None:
        self.structures, self.train, self.val = structures, train, val
        self.batch_size, self.options, self.intensive = preset.batch_size, preset.options, intensive
        count, target = structures.count[train], structures.target[train]
        self.mean = float((target if intensive else target / count).mean())
        residual = target - (self.mean if intensive else self.mean * count)
        self.scale = float(residual.square().mean().sqrt()) or 1.0

    def model(self) -> nn.Module:
        return EnergySchNet(**self.options["model"])

    def batch(self, seed: int, step: int) -> Graphs:
        return self.structures.batch(self.train[batch_index(len(self.train), self.batch_size, seed, step)])

    def residual(self, model: nn.Module, batch: Graphs) -> Tensor:
        """Prediction minus target, in units of the spread."""
        batch = batch.to(device_of(model))
        energy = model(batch.numbers, batch.edges, batch.distances, batch.structure, len(batch.target))
        count = torch.bincount(batch.structure, minlength=len(batch.target))
        if self.intensive:
            energy, target = energy / count, batch.target - self.mean
        else:
            target = batch.target - self.mean * count
        return energy - (target / self.scale).to(energy.dtype)

    def loss(self, model: nn.Module, batch: Graphs) -> Tensor:
        loss = self.residual(model, batch).square().mean()
        return loss * self.scale**2 if self.options.get("loss_unit") == "eV" else loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``mae`` in eV (for each atom where the target is intensive)."""
        with evaluating(model):
            parts = self.val.split(min(self.batch_size, 100))
            error = torch.cat([self.residual(model, self.structures.batch(part)) for part in parts]).double()
        unit = self.scale**2 if self.options.get("loss_unit") == "eV" else 1.0
        return {"loss": float(error.square().mean()) * unit, "mae": float(error.abs().mean()) * self.scale}


def split(count: int, train: int, val: int) -> tuple[Tensor, Tensor]:
    """A fixed random split, the same for every run; the training part gives way where there are too few."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(count))
    val = min(val, count // 2)
    return order[val : val + train], order[:val]


# ------------------------------------------------------------------------------------------------ sizes and recipes


def _model(width: int, interactions: int, gaussians: int, cutoff: float) -> dict[str, Any]:
    return {
        "hidden_channels": width,
        "num_filters": width,
        "num_interactions": interactions,
        "num_gaussians": gaussians,
        "cutoff": cutoff,
    }


def small(target: float, train: int) -> Preset:
    options = {"model": _model(32, 2, 25, 5.0), "train": train, "validation": 300}
    return Preset(steps=300, batch_size=16, evaluate_every=15, target=target, warmup=10, options=options)


def standard(target: float, steps: int, train: int, validation: int) -> Preset:
    options = {"model": _model(64, 3, 25, 5.0), "train": train, "validation": validation}
    return Preset(
        steps, batch_size=32, evaluate_every=steps // 40, target=target, warmup=100, decay=0.0, options=options
    )


def paper(target: float, epoch: int, cutoff: float, train: int, validation: int) -> Preset:
    """100 epochs of so many steps, with SchNetPack's model and batch; the paper names neither."""
    options = {"model": _model(128, 6, 50, cutoff), "train": train, "validation": validation, "loss_unit": "eV"}
    return Preset(100 * epoch, 100, evaluate_every=epoch, target=target, schedule="constant", options=options)


def recipes(epoch: int, damping: float, sgd: float) -> Mapping[str, Recipe]:
    """The paper's settings; NG+ has lr * max(epoch - 10, 1)^-0.5."""
    decay = {"weight_decay": 1e-5}
    return {
        "ngplus-paper": Recipe(
            {"lr": 2e-4, "damping": damping, "update_every": 200, **decay},
            {"schedule": f"inverse-sqrt:{epoch}:{10 * epoch}"},
        ),
        "adam": Recipe({"lr": 1e-4, **decay}, {"schedule": "constant"}),
        "sgd": Recipe({"lr": sgd, **decay}, {"schedule": "constant"}),
    }
