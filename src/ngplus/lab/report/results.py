"""A comparison as a page of Markdown: where NGAdam wins, ties and loses, made from the runs.

The page of the presets ``standard`` is made by :mod:`ngplus.lab.sweep`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ngplus.lab.report.curves import Section
from ngplus.lab.report.summary import (
    TIMES,
    Row,
    differing,
    duration,
    either,
    goal,
    rows,
    score_names,
    table,
)  # fmt: skip
from ngplus.lab.terminal import count

OURS = "ngadam"
PAPER_RIVALS = {"sgd": "SGD", "kfac": "KFAC"}
TIE = 0.05  # the part by which two means may differ and still be called a tie

RULE = f"""\
The best other optimizer gets to the target with most of its seeds, and among those in the fewest steps (or the least
time). More seeds win, then the mean. A difference of at most {100 * TIE:.0f} %, or in steps of one evaluation, is a
**tie**."""


def markdown(
    sections: Sequence[Section], timed: Sequence[Section], pictures: Mapping[tuple[str, str], str], command: str
) -> str:
    """The whole page. ``timed`` are runs made with nothing else running: only their times are shown."""
    parts = [
        "# Results on small presets",
        f"<!-- made by: {command} -->",
        "This page compares NGAdam with other optimizers on runs of seconds, by the steps to a target that was [set "
        "before](workloads.md) any of them was tuned. [Results](results.md) has runs of minutes.",
        "## Steps to the target",
        *_verdicts(sections, "steps"),
        RULE,
        _matrix(sections, "steps to target", target=True),
        _conditions(sections),
    ]
    if timed:
        parts += ["## Time to the target", f"From runs of their own on {_machines(timed)}, interleaved, one at a time."]
        parts += _verdicts(timed, "time")
        parts += [toggle(title, _matrix(timed, title).split("\n")) for title in TIMES]
    else:
        parts.append("Time was not measured: several runs were made at a time.")
    parts += _against_sgd_and_kfac(sections)
    measures = ", ".join(f"{section.runs[0].config.measure} on {section.name}" for section in sections)
    parts += [
        "## Measure at the end",
        f"{measures[:1].upper()}{measures[1:]}; mean ± standard deviation over the seeds.",
        _matrix(sections, "at the end"),
        *_scores(sections),
        "## Curves",
    ]
    found = ((section, pictures.get((section.workload, section.preset))) for section in sections)
    for section, picture in found:
        parts += [f"### {section.name}", f"![{section.name}: curves over steps]({picture})"] if picture else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _machines(sections: Sequence[Section]) -> str:
    runs = [run for section in sections for run in section.runs]
    return _listed({str(run.environment.get("processor") or "an unnamed processor") for run in runs})


def _conditions(sections: Sequence[Section]) -> str:
    runs = [run for section in sections for run in section.runs]
    versions = {f"torch {run.environment.get('torch', '?')}" for run in runs}
    threads = either(run.environment.get("threads", "?") for run in runs)
    each = "one thread each" if threads == "1" else f"{threads} threads each"
    trials: set[int] = set()
    finals: set[str] = set()
    published: set[str] = set()
    untuned: set[str] = set()
    for run in runs:
        tuning, who = run.config.tuning, f"{run.config.optimizer} on {run.config.workload}"
        if tuning and tuning.get("trials"):
            trials.add(len(tuning["trials"]))
            again = tuning.get("finalists", 1)
            finals.add(
                f"the best {again} of them on up to {len(tuning['seeds of the finals'])} seeds" if again > 1 else ""
            )
        else:
            (published if tuning else untuned).add(who)
    tries = "1 trial" if trials == {1} else f"{either(sorted(trials))} trials"
    told = f"Every optimizer was tuned with {tries}" if trials else "Nothing was tuned"
    told += f", {next(iter(finals))}" if len(finals) == 1 and finals != {""} else ""
    rest = f"; with a published recipe: {_listed(published)}" if published else ""
    rest += f"; not tuned, but with their defaults: {_listed(untuned)}" if trials and untuned else ""
    return (
        f"{count(len(runs), 'run')} on {_machines(sections)}, {each}, {_listed(versions)}. {told}{rest}. See the "
        "[rules](laboratory.md#what-makes-a-comparison-fair) and [what the numbers are "
        "worth](laboratory.md#what-the-shipped-numbers-are-worth)."
    )


def _verdicts(sections: Sequence[Section], kind: str) -> list[str]:
    """A sentence, and the table it comes from."""
    found: dict[str, list[str]] = {"wins": [], "ties": [], "loses": []}
    ratios: dict[str, float] = {}
    lines = []
    for section in sections:
        ours = next((row for row in rows(section.runs) if row.optimizer == OURS), None)
        rivals = [row for row in rows(section.runs) if row.optimizer not in (OURS, "ngplus", "ngplus-paper")]
        if ours is None or not rivals:
            continue
        best = min(rivals, key=lambda row: _standing(row, kind))
        word = verdict(ours, best, kind)
        found.setdefault(word, []).append(section.name)
        mine, theirs = _mean(ours, kind), _mean(best, kind)
        if mine and theirs:
            ratios[section.name] = mine / theirs
        ratio = f"{mine / theirs:.2f}" if mine and theirs else "–"
        lines.append((section.name, _shown(ours, kind), f"{best.optimizer}, {_shown(best, kind)}", ratio, word))
    if not lines:
        return ["There is nothing to compare: no workload has runs of NGAdam and of another optimizer."]
    uneven: dict[str, list[str]] = {}
    for section in sections:
        uneven.setdefault(differing(section.runs), []).append(section.name)
    uneven.pop("", None)
    said = {"neither gets there": "Neither gets there"}
    sentence = ". ".join(
        f"{said.get(word, f'NGAdam {word}')} on {_listed(names, 'none')}" for word, names in found.items()
    )
    return [
        f"{sentence}.",
        *_means(ratios, kind),
        _table(("workload", "NGAdam", "best other", "NGAdam / other", "verdict"), lines),
        toggle(
            "Not made under the same conditions",
            [f"- {_listed(names)}: {_plain(text)}" for text, names in uneven.items()],
        )
        if uneven
        else "",
    ]


def _means(
    ratios: Mapping[str, float], kind: str, ours: str = "NGAdam", theirs: str = "the best other optimizer"
) -> list[str]:
    if not ratios:
        return []
    worst = max(ratios, key=lambda name: ratios[name])
    return [
        f"Over the {count(len(ratios), 'workload')} where both get there, {ours} takes "
        f"{statistics.geometric_mean(ratios.values()):.2f} of {theirs}'s {kind} in the geometric mean, and "
        f"{ratios[worst]:.2f} at worst ({worst})."
    ]


def _against_sgd_and_kfac(sections: Sequence[Section]) -> list[str]:
    """NGPlus beside the two methods that the paper compares it with; nothing without runs of all three."""
    lines, ahead = [], []
    ratios: dict[str, dict[str, float]] = {name: {} for name in PAPER_RIVALS}
    lost: list[str] = []
    for section in sections:
        found = {row.optimizer: row for row in rows(section.runs)}
        if not {"ngplus", *PAPER_RIVALS} <= set(found):
            continue
        ours, title = found["ngplus"], section.name
        cells = []
        for name in PAPER_RIVALS:
            mine, theirs = _mean(ours, "steps"), _mean(found[name], "steps")
            if mine and theirs:
                ratios[name][title] = mine / theirs
            cells.append(f"{mine / theirs:.2f}" if mine and theirs else "–")
        level = all(_as_often_and_as_soon(ours, found[name]) for name in PAPER_RIVALS)
        ahead += [title] if level else []
        ended = [run.result for run in ours.runs if run.result is not None]
        lost += [title for result in ended if result.collapsed or result.status == "diverged"]
        names = ("ngplus", *PAPER_RIVALS)
        lines.append((title, *(_shown(found[name], "steps") for name in names), *cells, "yes" if level else "no"))
    if not lines:
        return []
    titles = [PAPER_RIVALS[name] for name in PAPER_RIVALS]
    where = f" ({_listed(set(lost))})" if lost else ""
    return [
        "## NGPlus, SGD and KFAC",
        "NGPlus is tuned in the learning rate and `relative_damping`, with the momentum that "
        "[the laboratory](laboratory.md#what-the-shipped-numbers-are-worth) names. "
        f"On {len(ahead)} of {count(len(lines), 'workload')} it gets to the target with at least as many seeds as SGD "
        f"and KFAC, and in no more steps: {_listed(ahead, 'none')}. A run that diverges or loses the target again "
        f"counts as one that missed it; of NGPlus, {count(len(lost), 'run')} did{where}.",
        *(line for name, other in PAPER_RIVALS.items() for line in _means(ratios[name], "steps", "NGPlus", other)),
        _table(("workload", "NGPlus", *titles, *(f"NGPlus / {t}" for t in titles), "as often and as soon"), lines),
    ]


def _as_often_and_as_soon(ours: Row, theirs: Row) -> bool:
    """Does it reach the target with at least as many seeds, and in no more steps by the mean?"""
    mine, other = _values(ours, "steps"), _values(theirs, "steps")
    if not mine or len(mine) * len(theirs.runs) < len(other) * len(ours.runs):
        return False
    return not other or statistics.mean(mine) <= statistics.mean(other)


def verdict(ours: Row, theirs: Row, kind: str) -> str:
    """wins, ties or loses; ``kind`` is steps or time."""
    mine, other = _values(ours, kind), _values(theirs, kind)
    share, rival = len(mine) / len(ours.runs), len(other) / len(theirs.runs)
    if share != rival:
        return "wins" if share > rival else "loses"
    if not mine:
        return "neither gets there"
    a, b = statistics.mean(mine), statistics.mean(other)
    resolution = float(ours.runs[0].config.evaluate_every) if kind == "steps" else 0.0
    if abs(a - b) <= max(TIE * max(a, b), resolution):
        return "ties"
    return "wins" if a < b else "loses"


def _matrix(sections: Sequence[Section], column: str, target: bool = False) -> str:
    """A column of the sections' tables, a line for each optimizer. ``target``: with the runs that went wrong, and with
    the targets and budgets in the last lines."""
    found = []
    for section in sections:
        headings, lines = table(section.runs)
        cells = (line[headings.index(column)] for line in lines)
        held = zip(rows(section.runs), cells, strict=True)
        found.append({row.optimizer: f"{cell}{row.notes() if target else ''}" for row, cell in held})
    names = sorted(dict.fromkeys(name for held in found for name in held), key=lambda n: (not n.startswith(OURS), n))
    out = [(name, *(held.get(name, "") for held in found)) for name in names]
    if target:
        out.append(("*target*", *(goal(section.runs) for section in sections)))
        out.append(("*budget*", *(either(run.config.steps for run in section.runs) for section in sections)))
    return _table(("optimizer", *(section.name for section in sections)), out)


def _scores(sections: Sequence[Section]) -> list[str]:
    """What is measured once, at the end of a run."""
    told = []
    for section in sections:
        headings, lines = table(section.runs)
        for name in score_names(section.runs):
            cells = "; ".join(f"{line[0]} {line[headings.index(name)]}" for line in lines)
            told.append(_plain(f"{name} on {section.name}: {cells}."))
    return told


def _values(row: Row, kind: str) -> list[float]:
    found = [r.steps_to_target if kind == "steps" else r.seconds_to_target for r in row.reached()]
    return [float(value) for value in found if value is not None]


def _mean(row: Row, kind: str) -> float | None:
    values = _values(row, kind)
    return statistics.mean(values) if values else None


def _standing(row: Row, kind: str) -> tuple[float, float, float]:
    mean = _mean(row, kind)
    return (row.rank()[0], float("inf") if mean is None else mean, row.rank()[2])


def _shown(row: Row, kind: str) -> str:
    mean, reached = _mean(row, kind), len(_values(row, kind))
    if mean is None:
        return "not reached"
    text = f"{mean:.0f}" if kind == "steps" else duration(mean)
    return text if reached == len(row.runs) else f"{text} ({reached} of {len(row.runs)})"


def _listed(names: Iterable[str], nothing: str = "") -> str:
    return ", ".join(sorted(names)) or nothing


def toggle(title: str, lines: Iterable[str]) -> str:
    """A part of the page that is folded until a reader opens it."""
    return "\n".join([f'??? note "{title}"', "", *(f"    {line}".rstrip() for line in lines)])


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruled = [headings, ["---"] * len(headings), *([_plain(cell) for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled)


def _plain(text: str) -> str:
    """Somebody's text in a cell or a line: no markup of its own."""
    return re.sub(r"([\\`<>\[\]|])", r"\\\1", text.replace("\n", " "))
