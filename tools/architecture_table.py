"""Writes docs/architectures.md: what NGPlus captures of real architectures, and how far that is from brute force.

python tools/architecture_table.py            all of them, and the page
python tools/architecture_table.py Llama T5   some of them, printed

Fails if a matrix that is called per-sample is not the samples' curvature.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
import warnings
from pathlib import Path

import torch

from ngplus.capture import reasons

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from architectures.cases import ARCHITECTURES, Architecture  # noqa: E402
from architectures.measure import EXACT, EXACT_IN_FLOAT32, Found, measure  # noqa: E402

MODULES = ("text", "vision", "graphs", "diffusion", "adapters")
PAGE = ROOT / "docs" / "architectures.md"

HEAD = """# Captured architectures

This page shows which matrices of {count} architectures `NGPlus` captures sample by sample, and how exact that is.

The columns have the number of matrices with per-sample curvature by a [layer rule](layers.md) (sample) or by
`torch.func.vmap` (vmap), and of those with mini-batch curvature (batch), with the reasons, which
[Troubleshooting](troubleshooting.md#no-per-sample-curvature) explains.

The error of a matrix with per-sample curvature is $\\lVert L - L' \\rVert / \\lVert L' \\rVert$ after one refresh, $L'$
from batches of one sample each. The largest one is {worst:.0e}; {worst_in_float32:.0e} in models that compute in float32.

The models are small, with random weights and no dropout, batch norms in `eval()` mode, in float64. The loss is a
weighted sum over the outputs of a sample, and a mean over samples. Frozen matrices are left out.
`python tools/architecture_table.py` (extra `ngplus[dev]`) writes this page, and fails at errors of {exact:.0e}, or
{exact_in_float32:.0e} with float32.

| reason | meaning |
| --- | --- |
{legend}
"""  # noqa: E501


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for module in MODULES:
        importlib.import_module(f"architectures.{module}")
    found = {}
    for name in names or ARCHITECTURES:
        found[name] = measure(ARCHITECTURES[name])
        print(name, cells(ARCHITECTURES[name], found[name]), f"{found[name].worst:.0e}", sep=" | ", flush=True)
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
        legend=legend([reason for each in found.values() for reason in each.reasons]),
    )
    parts = [head]
    for library in dict.fromkeys(ARCHITECTURES[name].library for name in found):
        own = [name for name in found if ARCHITECTURES[name].library == library]
        whole = [name for name in own if set(+found[name].sources) == {"sample"}]  # a list, not rows
        parts.append(f"## {library}\n")
        rows: dict[str, list[str]] = {}  # models that are alike share a row
        for name in own:
            if name not in whole:
                rows.setdefault(cells(ARCHITECTURES[name], found[name]), []).append(name)
        if rows:
            columns = "| model | sample | vmap | batch | reasons |\n| --- | --- | --- | --- | --- |"
            lines = [f"| {'; '.join(names)} | {rest} |" for rest, names in rows.items()]
            parts.append("\n".join([columns, *lines, ""]))
        if whole:
            models = "; ".join(f"{name} ({found[name].sources['sample']})" for name in whole)
            parts.append(textwrap.fill(f"All matrices by layer rules: {models}.", 120) + "\n")
    return "\n".join(parts)


def cells(architecture: Architecture, found: Found) -> str:
    counts = [str(found.sources[source] or "") for source in ("sample", "vmap", "batch")]
    why = "; ".join(f"{short(reason)} ({count})" for reason, count in found.reasons.most_common())
    if architecture.mixes:
        why += f". Error not measured: {architecture.mixes}"
    why = why.replace("__", r"\_\_")  # no bold text
    return " | ".join([*counts, why])


def short(reason: str) -> str:
    """A reason by its name in ngplus.capture.reasons, with its detail."""
    text = reasons.without_detail(reason)
    name = next(name for name, value in vars(reasons).items() if name.isupper() and value == text)
    return name.lower().replace("_", " ") + reason.removeprefix(text)


def legend(used: list[str]) -> str:
    texts = sorted({reasons.without_detail(reason) for reason in used}, key=short)
    return "\n".join(f"| {short(text)} | {text} |" for text in texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
