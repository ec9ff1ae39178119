"""``ngplus claims``: the numbers of the paper's Section 5 one by one, beside those of runs.

A claim compares NG+ with another method. It is reproduced where NG+ is ahead here as well. Both numbers are shown, so
that their sizes can be compared, too. A claim that needs data or machines which are not here says so, with its command.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import terminal

if TYPE_CHECKING:
    from ngplus.lab.runs import Run

FORMS = {"ngplus": "NGPlus", "ngplus-paper": "the paper's form"}
REPRODUCED, LEVEL, NOT_REPRODUCED = "reproduced", "level", "not reproduced"
NOT_RUN = "not runnable here"
HEADINGS = ("where", "the paper", "the paper's number", *(f"here: {title}" for title in FORMS.values()), "verdict")


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper.

    Attributes:
        where: the table or figure.
        says: what the paper reports.
        number: the paper's number, NG+ before the other.
        quantity: what is compared here: "steps" to the target; a metric, as it is at the end; "cost" of a step.
        workload: with which it is compared here; none where it cannot be run.
        rival: the optimizer that NG+ is compared with.
        more: is more of the metric better?
        note: what differs from the paper's experiment, or why there is none.
    """

    where: str
    says: str
    number: str
    quantity: str = ""
    workload: str = ""
    rival: str = ""
    more: bool = False
    note: str = ""


_RESNET = "a ResNet of 3 blocks on 10,000 CIFAR-10 images, not ResNet-50 on ImageNet-1k; steps, not epochs"
_COST = "ResNet-50, 224 pixels, batch 32, T = 20 on a CPU; the paper has batch 256, T = 500 on GPUs"

CLAIMS: tuple[Claim, ...] = (
    Claim("Table 1", "fewer epochs than SGD", "40 / 76 = 0.53", "steps", "cifar10", "sgd", note=_RESNET),
    Claim("Table 1", "fewer epochs than LARS", "40 / 74 = 0.54", "steps", "cifar10", "lars", note=_RESNET),
    Claim("Table 1", "fewer epochs than KFAC", "40 / 42 = 0.95", "steps", "cifar10", "kfac", note=_RESNET),
    Claim("Table 1", "an epoch takes less time than KFAC's", "600 s / 686 s = 0.87", "cost", rival="KFAC", note=_COST),
    Claim("Table 1", "an epoch takes 1.16 of SGD's time", "600 s / 517 s = 1.16", "cost", rival="SGD", note=_COST),
    Claim(
        "Table 1, Figure 2",
        "less time to 75.9 % than SGD, LARS and KFAC",
        "6.7 h; 10.9, 10.7 and 8.0 h",
        note="needs ImageNet-1k and GPUs: `ngplus compare imagenet --preset paper --optimizers ngplus-paper,kfac,sgd`",
    ),
    Claim(
        "Table 2",
        "as many epochs with batches of 2,048 and 4,096",
        "41 and 41, with 256: 40",
        note="needs ImageNet-1k and GPUs: `ngplus train imagenet --preset paper-2048 --optimizer ngplus-paper`",
    ),
    Claim(
        "Figure 3, QM9",
        "a lower validation loss than Adam, by epochs",
        "drawn",
        "mae",
        "qm9",
        "adam",
        note="a small SchNet on 10,000 molecules",
    ),
    Claim(
        "Figure 3, MatProj",
        "fewer epochs to a loss than Adam",
        "under 20 / over 30 = 0.67",
        "steps",
        "materials",
        "adam",
        note="a small SchNet on 3,400 crystals, not 69,000",
    ),
    Claim(
        "Figure 3, MatProj",
        "a lower validation loss than Adam, by epochs",
        "drawn",
        "mae",
        "materials",
        "adam",
        note="as above",
    ),
    Claim(
        "Figure 4",
        "a lower training loss than Adam",
        "drawn",
        "train_loss",
        "multi30k",
        "adam",
        note="a Transformer of one layer on Multi30k, not IWSLT14; the training loss of the last steps",
    ),
    Claim(
        "Section 5.3",
        "BLEU of 34.79 ± 0.09, Adam's 34.75 ± 0.08",
        "34.79 / 34.75",
        "bleu",
        "multi30k",
        "adam",
        more=True,
        note="the same. With IWSLT14: `ngplus compare iwslt14 --preset paper --optimizers ngplus-paper,adam`",
    ),
    Claim(
        "Figure 5",
        "a higher test accuracy than AdaGrad",
        "79.175 % / 79.149 %",
        "accuracy",
        "criteo",
        "adagrad",
        more=True,
        note="a small DLRM on a sample of Criteo's days. With all of it: `ngplus compare criteo --preset paper "
        "--optimizers ngplus-paper,adagrad,sgd`",
    ),
    Claim(
        "Figure 5",
        "a higher test accuracy than SGD",
        "drawn",
        "accuracy",
        "criteo",
        "sgd",
        more=True,
        note="as above",
    ),
)


def register(app: typer.Typer) -> None:
    app.command(name="claims", help=terminal.paragraphs(claims))(claims)


def claims(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Folders with runs, or files of ngplus report --json.")
    ],
    costs: Annotated[
        Path | None, typer.Option(help="The bench.json of ngplus bench, with the row rivals: the cost of a step.")
    ] = None,
    preset: Annotated[str, typer.Option(help="The preset of the runs to use.")] = "small",
    summary: Annotated[Path | None, typer.Option(help="Write a Markdown page to this file.")] = None,
) -> None:
    """Compare the numbers of the paper's Section 5 with runs: reproduced, level, not reproduced, or not runnable here.

    NG+ stands for two optimizers: ngplus, and ngplus-paper, the paper's form. Each has a column of its own, and the
    verdict is that of the better one.

    ngplus claims docs/results-small/steps/*.json --costs docs/performance/bench.json --summary docs/claims.md
    """
    console = terminal.make_console()
    with terminal.friendly(console):
        from rich.table import Table

        from ngplus.lab import collection
        from ngplus.lab.runs import read_json, write_atomically

        found = [r for r in collection.first(collection.find(runs)) if r.config.preset == preset and r.result]
        rows = bench_rows(read_json(costs)) if costs is not None else {}
        lines = [line(claim, found, rows) for claim in CLAIMS]
        table = Table(title="The paper's claims", caption=told(lines), caption_justify="left")
        for heading in HEADINGS:
            table.add_column(heading)
        for cells in lines:
            table.add_row(*map(terminal.shown, cells))
        console.print(table)
        if summary is not None:
            command = f"ngplus claims {named(runs)}{f' --costs {costs}' if costs else ''} --summary {summary}"
            write_atomically(summary, page(lines, command).encode())
            console.print(f"Written to {terminal.shown(str(summary))}", highlight=False)


def named(places: Sequence[Path]) -> str:
    """The arguments of a command; several files of a folder as FOLDER/*.json."""
    folders = [path.parent for path in places if path.suffix == ".json"]
    shown = [
        f"{path.parent}/*.json" if path.suffix == ".json" and folders.count(path.parent) > 1 else str(path)
        for path in places
    ]
    return " ".join(dict.fromkeys(shown))


def line(claim: Claim, runs: Sequence[Run], costs: dict[str, float]) -> tuple[str, ...]:
    """The cells of a claim: where, what, the paper's number, the number of each form of NG+, the verdict."""
    if not claim.quantity:
        return (claim.where, claim.says, claim.number, *("–" for _ in FORMS), NOT_RUN)
    if claim.quantity == "cost":  # what is timed is the paper's form
        outcomes = [("–", None), cost(claim, costs)]
    else:
        outcomes = [compared(claim, runs, form) for form in FORMS]
    cells = [shown for shown, _ in outcomes]
    known = [found for _, found in outcomes if found is not None]
    verdict = next((word for word in (REPRODUCED, LEVEL, NOT_REPRODUCED) if word in known), NOT_RUN)
    return (claim.where, claim.says, claim.number, *cells, verdict)


def compared(claim: Claim, runs: Sequence[Run], form: str) -> tuple[str, str | None]:
    """The number of a form of NG+ beside its rival's on the seeds that both have, and the verdict; None without such
    seeds."""
    here = [run for run in runs if run.config.workload == claim.workload]
    ours, theirs = ([run for run in here if run.config.optimizer == name] for name in (form, claim.rival))
    shared = {run.config.seed for run in ours} & {run.config.seed for run in theirs}
    ours, theirs = ([run for run in part if run.config.seed in shared] for part in (ours, theirs))
    if not shared:
        return "–", None
    if claim.quantity == "steps":
        return steps(ours, theirs)
    both = [
        [value for run in part if (value := at_the_end(run, claim.quantity)) is not None] for part in (ours, theirs)
    ]
    if not all(both):
        return "–", None
    means = [statistics.mean(values) for values in both]
    text = " / ".join(f"{_spread(values)}" for values in both)
    lead = means[0] - means[1] if claim.more else means[1] - means[0]
    spread = max(statistics.stdev(values) if len(values) > 1 else 0.0 for values in both)
    return text, REPRODUCED if lead > spread else LEVEL if lead >= -spread else NOT_REPRODUCED


def steps(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[str, str]:
    """Mean steps to the target. NG+ is ahead if it gets there with more of its seeds, or with as many and sooner."""
    both = [[s for run in part if (s := reached(run)) is not None] for part in (ours, theirs)]
    texts = []
    for part, values in zip((ours, theirs), both, strict=True):
        share = "" if len(values) == len(part) else f" ({len(values)} of {len(part)})"
        texts.append(f"{statistics.mean(values):.0f}{share}" if values else "never")
    text = " / ".join(texts)
    shares = [len(values) / len(part) for values, part in zip(both, (ours, theirs), strict=True)]
    if not (both[0] and both[1]):
        return text, REPRODUCED if shares[0] > shares[1] else NOT_REPRODUCED
    ratio = statistics.mean(both[0]) / statistics.mean(both[1])
    ahead = shares[0] > shares[1] or (shares[0] == shares[1] and ratio < 1)
    return f"{text} = {ratio:.2f}", REPRODUCED if ahead else NOT_REPRODUCED


def reached(run: Run) -> int | None:
    """The steps to the target; None where it was not reached, or lost again."""
    return None if run.result is None or run.result.collapsed else run.result.steps_to_target


def at_the_end(run: Run, quantity: str) -> float | None:
    """A metric at the last step, or a score that is measured once; None where there is none, or the run diverged."""
    if run.result is None or run.result.status != "finished":
        return None
    if quantity in run.result.scores:
        return run.result.scores[quantity]
    values = [row[quantity] for row in run.metrics if quantity in row]
    return float(values[-1]) if values and math.isfinite(values[-1]) else None


def bench_rows(content: Any) -> dict[str, float]:
    """What a training step on ResNet-50 costs by SGD's, by the optimizer's name in the table of ngplus bench."""
    rows = content.get("rows", []) if isinstance(content, dict) else []
    found = {"SGD": 1.0}
    for row in rows:
        name, colon, rest = str(row.get("what", "")).partition(": training step against SGD")
        if row.get("row") == "rivals" and colon and "ResNet-50" in rest and isinstance(row.get("measured"), float):
            found[name] = row["measured"]
    return found


def cost(claim: Claim, costs: dict[str, float]) -> tuple[str, str | None]:
    """The ratio of the costs of a training step; NG+ is ahead where it is no larger than the paper's."""
    mine = costs.get("NGPlus", costs.get('NG+ "inverse"'))  # its name until NGAdam came
    if mine is None or claim.rival not in costs:
        return "–", None
    ratio = mine / costs[claim.rival]
    return f"{mine:.2f} / {costs[claim.rival]:.2f} = {ratio:.2f}", (
        REPRODUCED if ratio <= float(claim.number.rpartition("=")[2]) else NOT_REPRODUCED
    )


def told(lines: Sequence[Sequence[str]]) -> str:
    """How many claims have each verdict."""
    verdicts = [cells[-1] for cells in lines]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in (REPRODUCED, LEVEL, NOT_REPRODUCED, NOT_RUN))


def page(lines: Sequence[Sequence[str]], command: str) -> str:
    """The page of Markdown."""
    rows = [HEADINGS, ["---"] * len(HEADINGS), *lines]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    notes = dict.fromkeys(f"- **{claim.where}**: {claim.note}." for claim in CLAIMS if claim.note != "as above")
    parts = [
        "# The paper's claims",
        f"<!-- made by: {command} -->",
        f"This page compares the numbers of the paper's Section 5 with runs: {told(lines)}.",
        table,
        "Each number is NG+ / the other method: mean and standard deviation over the seeds that both have. Steps are "
        "those to the target of the preset `small`, with the number of seeds that reach it where not all do. A claim "
        "is reproduced where one form of NG+ is ahead: `NGPlus`, or the paper's form (`ngplus-paper`). Measures at the "
        "end are level where the means differ by no more than the larger standard deviation. See "
        "[how each method was tuned](results-small.md) and the "
        "[rules](laboratory.md#what-makes-a-comparison-fair).",
        "## What was run in place of the paper's experiments",
        "\n".join(notes),
        "The preset `paper` of the [workloads](workloads.md#the-papers-settings) has the full recipes.",
    ]
    return "\n\n".join(parts) + "\n"


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{deviation}"
