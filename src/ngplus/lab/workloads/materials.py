"""Formation energies of crystals (Materials Project) with SchNet on periodic neighbour lists."""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from ase.data import atomic_numbers
from matscipy.neighbours import neighbour_list

from ngplus.lab.workloads.base import Preset, Workload
from ngplus.lab.workloads.files import Arrays, Folder, cached, folder
from ngplus.lab.workloads.recipe import Recipe
from ngplus.lab.workloads.schnet import Crystals, EnergyTask, paper, recipes, small, split, standard

HELP = """The 3,938 crystals of Faber et al. are the set "flla" of https://hackingmaterials.lbl.gov/matminer/; put it at
  DATA/materials/flla_2015.csv.gz      (or flla_2015.csv)
lines that start with # are left out; the columns structure (a Python literal of pymatgen's dict) and
formation_energy_per_atom (eV/atom) are read."""

Crystal = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def parse_structure(text: str) -> Crystal:
    """Cell (3 x 3), atomic numbers and positions from pymatgen's dict, as a Python literal; nothing is evaluated."""
    content = ast.literal_eval(text)
    cell = np.array(content["lattice"]["matrix"], float)
    fractions = np.array([site["abc"] for site in content["sites"]], float)
    species = [site["species"] for site in content["sites"]]
    if any(len(kinds) != 1 for kinds in species):
        raise ValueError("a site that more than one element shares")
    numbers = np.array([atomic_numbers[kinds[0]["element"]] for kinds in species])
    if cell.shape != (3, 3) or fractions.shape != (len(numbers), 3) or not np.isfinite(fractions).all():
        raise ValueError("the cell or the positions have the wrong shape")
    if not abs(np.linalg.det(cell)) > 1e-6:  # also where it is not a number
        raise ValueError("the cell has no volume")
    return cell, numbers, fractions @ cell


def periodic_pairs(crystal: Crystal, cutoff: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ordered pairs (from, to) with distances below the cutoff, an atom's own images among them."""
    cell, _, positions = crystal
    to, source, distance = neighbour_list(
        "ijd", cutoff=cutoff, positions=positions, cell=cell, pbc=np.array([True] * 3)
    )
    return np.stack([source, to]).astype(np.int64), distance.astype(np.float32)


def read(source: Folder, cutoff: float) -> Arrays:
    path = source.require("flla_2015.csv.gz", "flla_2015.csv")

    def make() -> Arrays:
        text = "\n".join(line for line in source.text(path).split("\n") if not line.startswith("#"))
        csv.field_size_limit(2**24)
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        if not rows:
            raise source.damaged(path, "it has no rows")
        crystals, energies = [], []
        for k, row in enumerate(rows):
            try:
                crystals.append(parse_structure(row["structure"]))
                energies.append(float(row["formation_energy_per_atom"]))
            except (ValueError, KeyError, TypeError, SyntaxError, IndexError, MemoryError, RecursionError) as error:
                raise source.damaged(path, f"row {k + 1}: {type(error).__name__}: {error}") from error
        pairs = [periodic_pairs(crystal, cutoff) for crystal in crystals]
        return {
            "count": np.array([len(numbers) for _, numbers, _ in crystals], np.int64),
            "numbers": np.concatenate([numbers for _, numbers, _ in crystals]).astype(np.int64),
            "energy": np.array(energies),
            "pairs": np.array([len(distance) for _, distance in pairs], np.int64),
            "edges": np.concatenate([edges for edges, _ in pairs], axis=1),
            "distances": np.concatenate([distance for _, distance in pairs]),
        }

    return cached([path], "materials", cutoff, make)


class Materials(Workload):
    name = "materials"
    title = "Materials Project formation energies, SchNet"
    measure = "mae"  # eV/atom
    higher_is_better = False
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": small(target=0.371, train=3_400),
        "standard": standard(target=0.148, steps=1_600, train=3_400, validation=500),
        # the paper's set, 69,000 crystals, is larger than this one
        "paper": paper(target=0.05, epoch=34, cutoff=5.0, train=3_400, validation=500),
    }
    recipes: ClassVar[Mapping[str, Mapping[str, Recipe]]] = {"paper": recipes(epoch=34, damping=0.6, sgd=5e-3)}

    def open(self, preset: Preset, data: Path | None) -> EnergyTask:
        arrays = read(folder(self.name, data, HELP), float(preset.options["model"]["cutoff"]))
        tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
        crystals = Crystals(
            tensors["count"],
            tensors["numbers"],
            tensors["energy"],
            tensors["pairs"],
            tensors["edges"],
            tensors["distances"],
        )
        train, val = split(len(crystals), preset.options["train"], preset.options["validation"])
        return EnergyTask(crystals, train, val, preset, intensive=True)
