"""The page of results, in Markdown, made from a sweep's runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ngplus.lab.amounts import amount
from ngplus.lab.report.results import toggle
from ngplus.lab.runs import write_atomically
from ngplus.lab.sweep import pictures
from ngplus.lab.sweep.numbers import (
    BASELINE,
    EARLIER,
    OURS,
    Standing,
    best_trial,
    geometric_mean,
    is_level,
    label,
    measure,
    of_today,
    standings,
    time_ratio,
    verdict,
    width,
)  # fmt: skip
from ngplus.lab.sweep.rows import RATE, TRIAL, Row, Timing, of
from ngplus.lab.sweep.tables import measure_cell, scores, settings_cell, shown, tasks_of, top
from ngplus.lab.terminal import count

NONE = "–"
QUIET = 0.2  # cores that other programs may use without being mentioned
WHAT = "This page compares NGAdam with tuned optimizers on the preset `standard`, runs of minutes."
RULE = (
    "A difference of at most 5 %, or of the larger standard deviation over the seeds, is a **tie**. A run that "
    "diverges, or falls back behind the level, does not count as reaching it."
)
EARLIER_RULES = (
    "**These runs follow earlier rules.** Only the learning rate was tuned: four rates, each twice the last, on one "
    f"seed, and more until the best had a neighbour on both sides. NGAdam is called `{EARLIER}` there. The size of the "
    "state was not recorded."
)
FAVOUR = (
    "NGAdam's update was [chosen](decision.md) on shakespeare, multi30k, cifar10, qm9 and materials, which favours it."
)
OTHER_PAGE = "[Small presets](results-small.md) has runs of seconds with more optimizers, SGD and KFAC among them."
PICTURES = "Lines are means over the seeds, bands their range. The dotted line is AdamW's final measure."


def write(page: Path, source: Path, rows: Sequence[Row], timings: Sequence[Timing]) -> Path:
    """The page, and in the folder of its name a picture of each task."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    held = of_today(rows)
    for task in tasks_of(held):
        pictures.write(folder, held, task)
    write_atomically(page, markdown(held, timings, page, source).encode())
    return page


@dataclass(frozen=True)
class Task:
    """The optimizers on a task, NGAdam before the others, and how long a step of each takes by AdamW's."""

    name: str
    found: tuple[Standing, ...]
    times: Mapping[str, tuple[float, float, float]]

    @property
    def ours(self) -> Standing:
        return self.found[0]

    @property
    def rivals(self) -> tuple[Standing, ...]:
        return self.found[1:]

    def part(self, one: Standing, kind: str) -> float:
        """Steps or time to AdamW's final measure, as a part of AdamW's budget."""
        return one.share * self.unit(one, kind)

    def unit(self, one: Standing, kind: str) -> float:
        """A step by AdamW's."""
        return self.times[one.name][0] if kind == "time" else 1.0

    def best_rival(self, kind: str) -> Standing:
        """The one that gets there first; the one with the better measure at the end where none does."""
        found = [one for one in self.rivals if kind == "steps" or one.name in self.times]
        return min(found, key=lambda one: (self.part(one, kind), one.error))

    def verdict(self, kind: str) -> str:
        best = self.best_rival(kind)
        spreads = [one.share_spread * self.unit(one, kind) for one in (self.ours, best)]
        return verdict(self.part(self.ours, kind), self.part(best, kind), max(spreads))


def tasks(rows: Sequence[Row], timings: Sequence[Timing]) -> list[Task]:
    """Those on which NGAdam and another optimizer have runs of the comparison."""
    found = []
    for name in tasks_of(rows):
        held = standings(rows, name)
        if held[0].name == OURS and len(held) > 1:
            chosen = {one.name: one.runs[0].hyper for one in held}
            clocked = [timing for timing in timings if timing.hyper == chosen.get(timing.optimizer)]
            ratios = {one.name: time_ratio(clocked, name, one.name) for one in held}
            found.append(Task(name, tuple(held), {k: ratio for k, ratio in ratios.items() if ratio is not None}))
    return found


def markdown(rows: Sequence[Row], timings: Sequence[Timing], page: Path, source: Path) -> str:
    """The whole page."""
    found = tasks(rows, timings)
    command = f"ngplus sweep --out {source} --summary {page}"
    made = [f"<!-- made by: {command} -->"]
    if not found:
        return "\n\n".join(["# Results", *made, "NGAdam and AdamW have no task with runs of both yet."]) + "\n"
    timed = [task for task in found if len(task.times) > 1 and task.ours.name in task.times]
    parts = ["# Results", *made, f"{WHAT} {_answer(found, timed)}", *_verdicts(found, "steps"), RULE]
    if timed:
        time = _verdicts(timed, "time")
        load = max(timing.load for timing in timings)
        busy = f" Other programs used up to {load:.1f} cores." if load > QUIET else ""
        parts += ["## Time", *time, toggle("Time of a training step, AdamW's is 1", _times(timed, busy))]
    else:
        parts.append("Time was not measured: two runs were made at a time.")
    parts.append(_conditions(rows, found))
    parts += ["## Final measure", *_finals(found)]
    parts.append(toggle("Steps to AdamW's final measure, all optimizers", _steps(found)))
    parts += _states(found)
    parts += ["## Learning rates", *_widths(rows, found), toggle("Settings of the best trials", _settings(found))]
    parts += ["## Tasks", PICTURES]
    for task in found:
        parts += _section(task, rows, page)
    parts.append(f"[The runs]({_link(source, page)}) are lines of JSON. {OTHER_PAGE}")
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------ the answer


def _answer(found: Sequence[Task], timed: Sequence[Task]) -> str:
    lead = f"**NGAdam reaches the final quality of a tuned AdamW in {_mean(found, 'steps')} of AdamW's steps"
    lead += f" and {_mean(timed, 'time')} of its time" if len(timed) == len(found) else ""
    first = [task.name for task in found if all(is_level(task.ours, one) for one in task.rivals)]
    rest = [task.name for task in found if task.name not in first]
    return (
        f"{lead}**, in the geometric mean of {count(len(found), 'task')}. Of the steps of the best other optimizer of "
        f"each task it takes {_against(found, 'steps')}. On {len(first)} of {len(found)} tasks its final measure is "
        f"the best or within a seed's spread of the best{f'; not on {_listed(rest)}' if rest else ''}."
    )


def _mean(found: Sequence[Task], kind: str) -> str:
    value = geometric_mean([task.part(task.ours, kind) for task in found])
    return f"{value:.2f}" if value < math.inf else "more than all"


def _against(found: Sequence[Task], kind: str) -> str:
    """NGAdam by the best rival: geometric mean and the worst task, over those where both get there."""
    ratios = {task.name: _ratio(task, kind) for task in found}
    known = {name: value for name, value in ratios.items() if value is not None}
    if not known:
        return NONE
    worst = max(known, key=lambda name: known[name])
    left = f", over the {count(len(known), 'task')} where both get there" if len(known) < len(ratios) else ""
    mean = geometric_mean(list(known.values()))
    return f"{mean:.2f} in the geometric mean and {known[worst]:.2f} at worst ({worst}){left}"


def _ratio(task: Task, kind: str) -> float | None:
    mine, theirs = task.part(task.ours, kind), task.part(task.best_rival(kind), kind)
    return mine / theirs if math.inf not in (mine, theirs) and theirs > 0 else None


def _conditions(rows: Sequence[Row], found: Sequence[Task]) -> str:
    seeds = {len(one.runs) for task in found for one in task.found}
    trials = {sum(r.kind == TRIAL for r in of(rows, task.name, one.name)) for task in found for one in task.found}
    about = {key: _either(rows, key) for key in ("processor", "torch")}
    machine = f" on {about['processor']}, torch {about['torch']}" if all(about.values()) else ""
    versions = len({row.environment["code"] for row in rows if "code" in row.environment})
    parts = [
        f"Each optimizer had {_span(trials)} trials a task, then {_span(seeds)} seeds, on one thread{machine} "
        "([rules](laboratory.md#sweeps)).",
        f"The runs come from {versions} versions of the code." if versions > 1 else "",
        FAVOUR,
        EARLIER_RULES if any(row.config is None for row in rows) else "",
    ]
    return " ".join(part for part in parts if part)


def _either(rows: Sequence[Row], key: str) -> str:
    return " or ".join(dict.fromkeys(str(row.environment[key]) for row in rows if row.environment.get(key)))


def _verdicts(found: Sequence[Task], kind: str) -> list[str]:
    words = {name: [task.name for task in found if task.verdict(kind) == name] for name in ("wins", "ties", "loses")}
    said = "; it ".join(f"{word} on {_listed(names)}" for word, names in words.items() if names)
    said = f"NGAdam {said}" if said else "nobody gets there"
    lines = []
    for task in found:
        best, ratio = task.best_rival(kind), _ratio(task, kind)
        baseline = next((one for one in task.rivals if one.name == BASELINE), None)
        cells = [shown(task.part(task.ours, kind)), NONE if baseline is None else shown(task.part(baseline, kind))]
        other = f"{label(best.name)}, {shown(task.part(best, kind))}"
        lines.append([task.name, *cells, other, NONE if ratio is None else f"{ratio:.2f}", task.verdict(kind)])
    head = ("task", "NGAdam", "AdamW", "best other", "NGAdam / other", "verdict")
    means = ""
    if kind == "time":
        means = (
            f" In the geometric mean NGAdam takes {_mean(found, kind)} of AdamW's time; by the best other optimizer's "
        )
        means += f"{_against(found, kind)}."
    return [
        f"{kind.capitalize()} to AdamW's final measure, as parts of AdamW's budget: {said}.{means}",
        _table(head, lines),
    ]


# ------------------------------------------------------------------------------------------------ other tables


def _matrix(
    found: Sequence[Task], cell: Callable[[Task, Standing], str], last: Callable[[str], str] | None = None
) -> list[str]:
    """A line for each optimizer, a column for each task, and one more for ``last``; cells are empty where there are no
    runs."""
    names = dict.fromkeys(one.name for task in found for one in task.found)
    lines = top(("optimizer", *(task.name for task in found), *([] if last is None else ["geometric mean"])))
    for name in names:
        held = [(task, one) for task in found for one in task.found if one.name == name]
        cells = {task.name: cell(task, one) for task, one in held}
        whole = [] if last is None else [last(name) if len(held) == len(found) else ""]
        lines.append(_line([label(name), *(cells.get(task.name, "") for task in found), *whole]))
    return lines


def _times(found: Sequence[Task], busy: str) -> list[str]:
    def cell(task: Task, one: Standing) -> str:
        ratio = task.times.get(one.name)
        return NONE if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"

    def last(name: str) -> str:
        held = [task.times[name][0] for task in found if name in task.times]
        return f"{geometric_mean(held):.2f}" if len(held) == len(found) else ""

    return [*_matrix(found, cell, last), "", f"Median and quartiles over rounds of blocks of steps, in turns.{busy}"]


def _finals(found: Sequence[Task]) -> list[str]:
    def cell(task: Task, one: Standing) -> str:
        best = min(task.found, key=lambda other: other.error)
        text = measure_cell(one.runs)
        return f"**{text}**" if is_level(one, best) and one.error < math.inf else text

    def last(name: str) -> str:
        ratios = []
        for task in found:
            held = {one.name: one.error for one in task.found}
            if not 0 < held.get(BASELINE, 0.0) < math.inf:
                return ""
            ratios.append(held[name] / held[BASELINE])
        return f"{geometric_mean(ratios):.3f}"

    what = ", ".join(f"{measure(task.ours.runs[0])} on {task.name}" for task in found)
    return [
        "\n".join(_matrix(found, cell, last)),
        f"{what[:1].upper()}{what[1:]}; mean and standard deviation over the seeds. Bold: the best, or within a seed's "
        "spread of the best. The last column is the mean error, AdamW's is 1.",
    ]


def _steps(found: Sequence[Task]) -> list[str]:
    def cell(task: Task, one: Standing) -> str:
        return f"{shown(one.share)} ± {one.share_spread:.2g}" if one.share < math.inf else shown(one.share)

    def last(name: str) -> str:
        mean = geometric_mean([one.share for task in found for one in task.found if one.name == name])
        return f"{mean:.3f}" if mean < math.inf else NONE

    return _matrix(found, cell, last)


def _settings(found: Sequence[Task]) -> list[str]:
    return _matrix(found, lambda task, one: settings_cell(one.runs))


def _states(found: Sequence[Task]) -> list[str]:
    """The size of the optimizers' state; nothing where the runs do not say."""
    if any(one.runs[0].state_bytes is None for task in found for one in task.found):
        return []

    def cell(task: Task, one: Standing) -> str:
        return amount(max(row.state_bytes or 0 for row in one.runs), "B")

    return ["## State", toggle("Bytes of the optimizer's state", _matrix(found, cell))]


def _widths(rows: Sequence[Row], found: Sequence[Task]) -> list[str]:
    def cell(task: Task, one: Standing) -> str:
        held = width(rows, task.name, one.name)
        sign = "> " if held is not None and held.open else ""
        return NONE if held is None else f"{sign}{held.factor:.1f} ({held.low:.2g} to {held.high:.2g})"

    def last(name: str) -> str:
        held = [width(rows, task.name, name) for task in found]
        factors = [one.factor for one in held if one is not None]
        sign = "> " if any(one is not None and one.open for one in held) else ""
        return f"{sign}{geometric_mean(factors):.1f}" if len(factors) == len(found) else ""

    lines = _matrix(found, cell, last)
    sentence = "; ".join(f"{label(one.name)} {last(one.name)}" for one in found[0].found if last(one.name))
    rated = any(row.kind == RATE for row in rows)
    return [
        "The largest learning rate whose error is within 2 % of the best, divided by the smallest, in the geometric "
        f"mean: {sentence or 'not known'}.",
        toggle(
            "Learning rates within 2 % of the best error",
            [
                *lines,
                "",
                f"From {'the trials and multiples of the best rate' if rated else 'the trials'} on one seed, by "
                "interpolation. >: the end of the range was not found.",
            ],
        ),
    ]


def _section(task: Task, rows: Sequence[Row], page: Path) -> list[str]:
    stem = f"{page.stem}/{task.name}"
    title = f"{task.name}: {measure(task.ours.runs[0])} over steps"
    steps = task.ours.runs[0].curve[-1][0]
    lost = [label(one.name) for one in task.found if best_trial(of(rows, task.name, one.name)) is None]
    told = [f"{steps:,} steps", *scores({label(one.name): one.runs for one in task.found})]
    told += [f"Diverged on every trial: {_listed(lost)}"] if lost else []
    return [
        f"### {task.name}",
        f"![{title}]({stem}.png)",  # the site shows {stem}-dark.png on dark pages
        f"{'. '.join(told)}.",
    ]


# ------------------------------------------------------------------------------------------------ Markdown


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join([*top(head), *map(_line, lines)])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _listed(names: Iterable[str]) -> str:
    held = list(names)
    return " and ".join(held) if len(held) < 3 else f"{', '.join(held[:-1])} and {held[-1]}"


def _span(values: Iterable[int]) -> str:
    held = sorted(set(values))
    return str(held[0]) if len(held) == 1 else f"{held[0]} to {held[-1]}"


def _link(source: Path, page: Path) -> str:
    """Where the file of the runs is, as the page says it."""
    import os

    return Path(os.path.relpath(source.resolve(), page.resolve().parent)).as_posix()
