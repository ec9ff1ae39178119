"""QM9 with SchNet: the energy U0 of small molecules, without the energies of their atoms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from ngplus.lab.workloads.base import Preset, Workload
from ngplus.lab.workloads.files import Arrays, Folder, cached, folder
from ngplus.lab.workloads.recipe import Recipe
from ngplus.lab.workloads.schnet import EnergyTask, Molecules, paper, recipes, small, split, standard

HELP = """QM9 is at https://doi.org/10.6084/m9.figshare.c.978904 (public domain). Lay it out as
  DATA/qm9/qm9.npz
with the arrays N (atoms of each molecule), Z and R (atomic numbers and positions in Angstrom of all atoms, one molecule
after the other), Y and Y_names (targets in Hartree, InternalEnergy_0K_au among them)."""

HARTREE = 27.211386245988  # eV
# U0 of single atoms, Hartree
ATOMS = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579, 9: -99.718730}


def read(source: Folder) -> Arrays:
    """Counts, numbers, positions, and the energy of each molecule less those of its atoms, in eV."""
    path = source.require("qm9.npz")

    def make() -> Arrays:
        with source.reading(path), np.load(path, allow_pickle=False) as held:
            count, numbers = held["N"].astype(np.int64), held["Z"].astype(np.int64)
            positions, targets = held["R"].astype(np.float32), held["Y"]
            names = [str(name) for name in held["Y_names"]]
            if count.sum() != len(numbers) or positions.shape != (len(numbers), 3) or len(targets) != len(count):
                raise ValueError("the lengths of N, Z, R and Y do not fit together")
            if count.min(initial=1) < 1 or not np.isin(numbers, list(ATOMS)).all():
                raise ValueError("a molecule without atoms, or an element other than H, C, N, O, F")
            reference = np.zeros(10)
            reference[list(ATOMS)] = list(ATOMS.values())
            first = np.cumsum(count) - count
            energy = targets[:, names.index("InternalEnergy_0K_au")] - np.add.reduceat(reference[numbers], first)
            if not (np.isfinite(energy).all() and np.isfinite(positions).all()):
                raise ValueError("a number is not finite")
        return {"count": count, "numbers": numbers, "positions": positions, "energy": energy * HARTREE}

    return cached([path], "qm9", None, make)


class QM9(Workload):
    name = "qm9"
    title = "QM9 U0, SchNet"
    measure = "mae"  # eV
    higher_is_better = False
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": small(target=0.687, train=10_000),
        "standard": standard(target=0.146, steps=2_400, train=50_000, validation=1_000),
        # the target is SchNet's published error
        "paper": paper(target=0.014, epoch=1_100, cutoff=10.0, train=110_000, validation=10_000),
    }
    recipes: ClassVar[Mapping[str, Mapping[str, Recipe]]] = {"paper": recipes(epoch=1_100, damping=0.17, sgd=4e-4)}

    def open(self, preset: Preset, data: Path | None) -> EnergyTask:
        arrays = {key: torch.from_numpy(value) for key, value in read(folder(self.name, data, HELP)).items()}
        cutoff = float(preset.options["model"]["cutoff"])
        molecules = Molecules(arrays["count"], arrays["numbers"], arrays["energy"], arrays["positions"], cutoff)
        train, val = split(len(molecules), preset.options["train"], preset.options["validation"])
        return EnergyTask(molecules, train, val, preset, intensive=False)
