"""qm9 and materials: readers, neighbours and the SchNet, against plain versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_data import (
    TINY_SCHNET,
    make_materials,
    make_qm9,
    open_tiny,
    structure,
)

from ngplus.lab import optimizers
from ngplus.lab.workloads import materials, schnet
from ngplus.lab.workloads.base import DataError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_schnet_is_torch_geometrics(tmp_path: Path) -> None:
    from torch_geometric.nn.models import SchNet

    make_qm9(tmp_path / "qm9")
    batch = open_tiny("qm9", tmp_path).batch(0, 0)
    torch.manual_seed(0)
    ours = schnet.EnergySchNet(**TINY_SCHNET)
    torch.manual_seed(0)
    theirs = SchNet(**TINY_SCHNET, interaction_graph=lambda pos, which: (batch.edges, batch.distances))
    positions = torch.zeros(len(batch.numbers), 3)
    wanted = theirs(batch.numbers, positions, batch.structure).squeeze(1)
    found = ours(batch.numbers, batch.edges, batch.distances, batch.structure, len(batch.target))
    torch.testing.assert_close(found, wanted)


def test_molecules_are_the_samples(tmp_path: Path) -> None:
    make_qm9(tmp_path / "qm9")
    task = open_tiny("qm9", tmp_path)
    model, batch = task.model(), task.batch(0, 0)
    optimizer = optimizers.get("ngplus").make(model, {"lr": 0.01})
    task.loss(model, batch).backward()
    optimizer.step()
    assert {matrix.seen[0] for matrix in optimizer._matrices if matrix.seen} == {len(batch.target)}


def test_neighbours_of_molecules(tmp_path: Path) -> None:
    make_qm9(tmp_path / "qm9")
    molecules = open_tiny("qm9", tmp_path).structures
    index = torch.tensor([5, 0, 17])
    batch = molecules.batch(index)
    places = torch.cat([torch.arange(molecules.first[k], molecules.first[k] + molecules.count[k]) for k in index])
    assert torch.equal(batch.numbers, molecules.numbers[places])
    wanted = {}
    for i in range(len(places)):
        for j in range(len(places)):
            distance = float((molecules.positions[places[i]] - molecules.positions[places[j]]).norm())
            if i != j and batch.structure[i] == batch.structure[j] and distance < 4.0:
                wanted[i, j] = distance
    found = {(int(i), int(j)): float(d) for i, j, d in zip(*batch.edges, batch.distances, strict=True)}
    assert found == pytest.approx(wanted, rel=1e-5)


def test_qm9_energies_are_without_atoms(tmp_path: Path) -> None:
    make_qm9(tmp_path / "qm9")  # 0.1 Hartree of binding for each atom
    task = open_tiny("qm9", tmp_path)
    torch.testing.assert_close(task.structures.target, -2.7211386245988 * task.structures.count.double())
    assert task.mean == pytest.approx(-2.7211386245988)
    assert set(task.train.tolist()).isdisjoint(task.val.tolist())


def test_neighbours_of_crystals() -> None:
    crystal = materials.parse_structure(str(structure(["Na", "Cl"], 3.0)))
    edges, distances = materials.periodic_pairs(crystal, 4.0)
    cell, _, positions = crystal
    images = np.array([[a, b, c] for a in range(-3, 4) for b in range(-3, 4) for c in range(-3, 4)]) @ cell
    wanted = []
    for i in range(2):
        for j in range(2):
            for length in np.linalg.norm(positions[j] + images - positions[i], axis=1):
                if 1e-9 < length < 4.0:
                    wanted.append((j, i, round(float(length), 4)))
    found = [(int(j), int(i), round(float(d), 4)) for j, i, d in zip(*edges, distances, strict=True)]
    assert sorted(found) == sorted(wanted)
    assert any(i == j for i, j, _ in found)  # an atom and its own image


def test_batches_of_crystals_keep_to_themselves(tmp_path: Path) -> None:
    make_materials(tmp_path / "materials")
    crystals = open_tiny("materials", tmp_path).structures
    both = crystals.batch(torch.tensor([7, 2]))
    alone = [crystals.batch(torch.tensor([k])) for k in (7, 2)]
    torch.testing.assert_close(both.distances, torch.cat([one.distances for one in alone]))
    shifted = torch.cat([alone[0].edges, alone[1].edges + len(alone[0].numbers)], dim=1)
    assert torch.equal(both.edges, shifted)
    assert torch.equal(both.structure[both.edges[0]], both.structure[both.edges[1]])


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "{'lattice': 1}",
        str(structure(["Na"], 0.0)),
        str(structure(["Xx"], 3.0)),
        str(structure(["Na"], 3.0)).replace("'abc': [0.0, 0.0, 0.0]", "'abc': [0.0]"),
        "(" * 500,
    ],
)
def test_a_bad_crystal_is_named_by_its_row(text: str, tmp_path: Path) -> None:
    (tmp_path / "materials").mkdir()
    good = f'"{structure(["Na"], 3.0)}",1.0'
    rows = ["structure,formation_energy_per_atom", good, f'"{text}",1.0']
    (tmp_path / "materials" / "flla_2015.csv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"flla_2015\.csv.*row 2"):
        open_tiny("materials", tmp_path)
