"""Writes docs/architectures.md: what NGPlus captures of real architectures, and how far that is from brute force.

python tools/architecture_table.py            all of them, and the page
python tools/architecture_table.py Llama T5   some of them, printed

Fails if a matrix that is called per-sample is not the samples' curvature.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from architectures.cases import ARCHITECTURES, Architecture  # noqa: E402
from architectures.measure import EXACT, EXACT_IN_FLOAT32, Found, measure  # noqa: E402

MODULES = ("text", "vision", "graphs", "diffusion", "adapters")
PAGE = ROOT / "docs" / "architectures.md"

HEAD = """# Architectures

This page shows what NGPlus captures of {count} architectures of transformers, torch_geometric, diffusers and peft, and
how far what it calls per-sample is from brute force: the gradients of batches of one sample each. The largest error of
all is {worst:.0e}; {worst_in_float32:.0e} where the model itself computes in float32.

Each model is small, has random weights, and is in `train()` mode without dropout and with batch norms in `eval()` mode.
It and its inputs are in float64. The loss is a sum over the outputs of a sample, each with a random weight, and the
mean over samples, so that a batch of one has the gradient of its sample. The error is |L - L'| / |L'| in the Frobenius
norm, of L or R after one refresh against the mean of G_i G_i^T or G_i^T G_i.

| column | meaning |
| --- | --- |
| sample | matrices whose per-sample curvature comes from a [layer rule](layers.md) |
| vmap | those of a module without a rule, by `torch.func.vmap` |
| batch | those with mini-batch curvature, with the reasons; [trouble-shooting](troubleshooting.md) explains each |
| error | the largest of the matrices of the first two columns; "float32" where the model computes in float32 |

Only matrices that get a gradient count, so the frozen ones of adapters do not. `python tools/architecture_table.py`
writes this page, and fails where an error is not below {exact:.0e}, or {exact_in_float32:.0e} with float32. It needs
the extra `ngplus[dev]`.
"""


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for module in MODULES:
        importlib.import_module(f"architectures.{module}")
    found = {}
    for name in names or ARCHITECTURES:
        found[name] = measure(ARCHITECTURES[name])
        print(row(ARCHITECTURES[name], found[name]), flush=True)
    if not names:
        PAGE.write_text(page(found))
    inexact = [name for name, each in found.items() if not each.worst < each.tolerance]
    print(f"{len(found)} architectures, not exact: {', '.join(inexact) or 'none'}")
    return len(inexact) > 0


def page(found: dict[str, Found]) -> str:
    in_float32 = [each.worst for each in found.values() if each.float32]
    in_float64 = [each.worst for each in found.values() if not each.float32]
    head = HEAD.format(
        count=len(found),
        worst=max(in_float64),
        worst_in_float32=max(in_float32),
        exact=EXACT,
        exact_in_float32=EXACT_IN_FLOAT32,
    )
    parts = [head]
    for library in dict.fromkeys(ARCHITECTURES[name].library for name in found):
        rows = [row(ARCHITECTURES[n], each) for n, each in found.items() if ARCHITECTURES[n].library == library]
        columns = "| model | sample | vmap | batch | error | why mini-batch |\n| --- | --- | --- | --- | --- | --- |"
        parts.append("\n".join([f"## {library}", "", columns, *rows, ""]))
    return "\n".join(parts)


def row(architecture: Architecture, found: Found) -> str:
    counts = [str(found.sources[source] or "") for source in ("sample", "vmap", "batch")]
    error = f"{found.worst:.0e}" + (", float32" if found.float32 else "") if found.errors else ""
    if architecture.mixes:
        error = f"not compared: {architecture.mixes}"
    reasons = "; ".join(f"{reason} ({count})" for reason, count in found.reasons.most_common())
    return "| " + " | ".join([architecture.name, *counts, error, reasons]) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
