"""The page: HTML, style and pictures in one file, without any script.

Names, settings and metrics come from files that anybody may have written: all of it goes through ``escape``, and a
content security policy keeps the page from running or loading anything, whatever it might contain.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ngplus.lab import terminal
from ngplus.lab.report import summary, svg
from ngplus.lab.report.curves import COLOURS, Section
from ngplus.lab.runs import Run

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(sections: Sequence[Section], title: str) -> str:
    """The whole page."""
    style = Path(__file__).with_name("page.css").read_text()
    # No script: a curve is hidden by its check box alone.
    hide = "".join(
        f"#s{n}:has(#s{n}o{place}:not(:checked)) .charts .o{place}{{display:none}}"
        for n, section in enumerate(sections)
        for place in section.places.values()
    )
    body = "".join(_section(number, section) for number, section in enumerate(sections))
    count = terminal.count(sum(len(section.runs) for section in sections), "run")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}{hide}</style></head>\n"
        f"<body><h1>{escape(title)}</h1><p>{count}. Lines are means over seeds, bands go from the worst seed to "
        f"the best.</p>{body}</body></html>\n"
    )


def _section(number: int, section: Section) -> str:
    charts = "".join(
        f"<figure><h3>{escape(chart.title)} over {escape(chart.x_label)}</h3>{svg.draw(chart)}</figure>"
        for chart in section.charts
    )
    table = _table(*summary.table(section.runs))
    notes = "<br>".join(escape(line) for line in summary.caption(section.runs).split("\n"))
    return (
        f'<section id="s{number}"><h2>{escape(section.workload)}, {escape(section.preset)}</h2>'
        f'<div class="scroll">{table}</div><p>{notes}</p>{_legend(number, section)}<div class="charts">{charts}</div>'
        f"<details open><summary>Hyper-parameters</summary>{_settings(section)}</details>"
        f"<details><summary>How they were tuned</summary>{_tuning(section)}</details>"
        f"<details><summary>Where it ran</summary>{_environment(section)}</details></section>\n"
    )


def _legend(number: int, section: Section) -> str:
    labels = []
    for name, place in section.places.items():
        dash = svg.DASHES[place // COLOURS % len(svg.DASHES)]
        labels.append(
            f'<label class="c{place % COLOURS} o{place}"><input type="checkbox" id="s{number}o{place}" checked>'
            f'<svg viewBox="0 0 26 10" aria-hidden="true"><path class="line" d="M0,5L26,5" stroke-dasharray="{dash}"/>'
            f"</svg><span>{escape(name)}</span></label>"
        )
    return f'<div class="legend">{"".join(labels)}</div>'


def _settings(section: Section) -> str:
    lines = []
    for row in summary.rows(section.runs):
        kinds = list(dict.fromkeys(_pairs(run.config.hyper) for run in row.runs))
        lines.append((row.optimizer, " / ".join(kinds)))
    return _words(("optimizer", "settings"), lines)


def _tuning(section: Section) -> str:
    lines = []
    for row in summary.rows(section.runs):
        told = row.runs[0].config.tuning
        if not told:
            lines.append((row.optimizer, "not tuned: its defaults, or settings of the user's own", ""))
            continue
        trials = told.get("trials")
        found = trials if isinstance(trials, list) else []
        shown = "; ".join(_trial(trial) for trial in found)
        rest = _pairs({key: value for key, value in told.items() if key != "trials"})
        lines.append((row.optimizer, f"{terminal.count(len(found), 'trial')}. {rest}", shown))
    return _words(("optimizer", "study", "trials: settings → score, smaller is better (those of the finals)"), lines)


def _trial(trial: Any) -> str:
    if not isinstance(trial, Mapping) or not isinstance(trial.get("hyper"), Mapping):
        return str(trial)
    again = trial.get("scores of the finals")
    more = f" ({', '.join(map(_value, again))})" if isinstance(again, list) else ""
    return f"{_pairs(trial['hyper'])} → {_value(trial.get('score'))}{more}"


def _environment(section: Section) -> str:
    kinds: dict[str, list[Run]] = {}
    for run in section.runs:
        kept = {key: value for key, value in run.environment.items() if key != "command"}
        kinds.setdefault(_pairs(kept), []).append(run)
    return _words(("runs", "environment"), ((str(len(held)), text) for text, held in kinds.items()))


def _pairs(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _words(headings: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    return f'<div class="scroll">{_table(headings, lines, "words")}</div>'


def _table(headings: Iterable[str], lines: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
