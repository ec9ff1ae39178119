"""Some of the architectures of docs/architectures.md; the script that makes the page checks all."""

from __future__ import annotations

import importlib
import re

import pytest

from architectures.cases import ARCHITECTURES
from architectures.measure import measure
from helpers.project import ROOT

pytestmark = pytest.mark.slow  # transformers takes as long to import as they all to run

QUICK = {
    "text": ["DeBERTa v3", "Longformer", "Mixtral", "T5"],
    "vision": ["DETR", "Swin v2"],
    "graphs": ["GIN", "SchNet, sample_index"],
    "adapters": ["DoRA on Llama"],
}
LIBRARIES = {"text": "transformers", "vision": "transformers", "graphs": "torch_geometric", "adapters": "peft",
             "diffusion": "diffusers"}  # fmt: skip


def load(module: str) -> None:
    pytest.importorskip(LIBRARIES[module])
    importlib.import_module(f"architectures.{module}")


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in QUICK.items() for name in names])
@pytest.mark.filterwarnings("ignore")
def test_what_is_called_per_sample_is_exact(module: str, name: str) -> None:
    load(module)
    found = measure(ARCHITECTURES[name])
    assert {matrix: error for matrix, error in found.errors.items() if error >= found.tolerance} == {}
    expected = {"GIN": set()}.get(name, {"sample"})  # its nodes are no samples
    assert expected <= set(found.sources)
    assert bool(found.errors) == bool(expected)


@pytest.mark.filterwarnings("ignore")
def test_the_page_has_all_of_them() -> None:
    for module in LIBRARIES:
        load(module)
    text = (ROOT / "docs" / "architectures.md").read_text().partition("\n## ")[2]
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    shown = [name for cell in rows for name in cell.split("; ")]
    for models in re.findall(r"All matrices by layer rules: (.+?)\.\n", text, re.S):
        shown += [re.sub(r" \(\d+\)$", "", model) for model in " ".join(models.split()).split("; ")]
    assert sorted({*shown} - {"model", "---"}) == sorted(ARCHITECTURES)
