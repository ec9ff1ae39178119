"""The page: HTML, style, data and scripts in one file, which loads nothing.

Names, settings and metrics come from files that anybody may have written. In the HTML all of it goes through
``escape``, in the data ``<`` is written as an escape of JSON, and the script makes text of it. A content security
policy lets the page run its two scripts, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from ngplus.lab import collection, terminal
from ngplus.lab.report import summary
from ngplus.lab.report.curves import COLOURS, Section
from ngplus.lab.runs import Run, plain

NAMED = 3  # workloads in the title; of more, their number
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def render(sections: Sequence[Section], title: str, day: date | None = None) -> str:
    """The whole page. ``day``: the date in its title (default: today)."""
    from plotly.offline import get_plotlyjs

    here = Path(__file__)
    style, own = here.with_name("page.css").read_text(), here.with_name("page.js").read_text()
    scripts = [get_plotlyjs().replace("\r\n", "\n"), own]  # a browser takes the digest of lines that end in \n
    policy = POLICY.format(scripts=" ".join(f"'sha256-{_digest(script)}'" for script in scripts))
    runs = [run for section in sections for run in section.runs]
    name, when = f"{title}: {_tasks(sections)}", f"{day or date.today()}, ngplus {_versions(runs)}"
    body = "".join(_section(number, section) for number, section in enumerate(sections))
    charts = [[plain(_six_digits(asdict(chart))) for chart in section.charts] for section in sections]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(f'{name}, {when}')}</title><style>{style}</style></head>\n"
        f"<body><h1>{escape(name)}</h1><p>{escape(when)}. {terminal.count(len(runs), 'run')}. Lines are means over "
        "seeds, bands go from the worst seed to the best. A run that diverged is in neither: it is a thin line that "
        "ends in a cross.</p>"
        '<p class="downloads"><button type="button" id="json">Download the runs as JSON</button> '
        '<button type="button" id="csv">as CSV</button></p>'
        f"<noscript><p>The charts need JavaScript.</p></noscript>{body}"
        f"{_data('charts', json.dumps(charts, allow_nan=False))}"
        f"{_data('runs', collection.text(collection.without_command(run) for run in runs))}"
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _data(name: str, content: str) -> str:
    """JSON that no element of HTML can end."""
    content = content.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{content}</script>\n'


def _six_digits(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _six_digits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_six_digits(entry) for entry in value]
    return collection.six_digits(value)


def _tasks(sections: Sequence[Section]) -> str:
    if len(sections) > NAMED:
        return terminal.count(len(sections), "workload")
    return ", ".join(section.name for section in sections)


def _versions(runs: Sequence[Run]) -> str:
    """Those that made the runs."""
    return summary.either(run.environment.get("ngplus", "of an unknown version") for run in runs)


def _section(number: int, section: Section) -> str:
    charts = "".join(
        f"<figure><h3>{escape(chart.title)} over {escape(chart.x_label)}</h3>"
        f'<div class="axes">log: {_box("x", chart.x_label)}{_box("y", "values", chart.logarithmic)}</div>'
        f'<div class="chart" role="group" aria-label="{escape(f"{chart.title} over {chart.x_label}")}"></div></figure>'
        for chart in section.charts
    )
    notes = "<br>".join(escape(line) for line in summary.caption(section.runs).split("\n"))
    return (
        f'<section id="s{number}"><h2>{escape(section.workload)}, {escape(section.preset)}</h2>'
        f'<div class="scroll">{_numbers(section)}</div><p>{notes}</p>{_legend(section)}'
        f'<div class="charts">{charts}</div>'
        f"<details open><summary>Hyper-parameters</summary>{_settings(section)}</details>"
        f"<details><summary>How they were tuned</summary>{_tuning(section)}</details>"
        f"<details><summary>Where it ran</summary>{_environment(section)}</details></section>\n"
    )


def _box(value: str, label: str, checked: bool = False) -> str:
    mark = " checked" if checked else ""
    return f'<label><input type="checkbox" value="{value}" autocomplete="off"{mark}> {escape(label)}</label>'


def _legend(section: Section) -> str:
    labels = [
        f'<label class="c{place % COLOURS} d{place // COLOURS % 4}">'
        f'<input type="checkbox" value="{place}" autocomplete="off" checked>'
        f"<i></i><span>{escape(name)}</span></label>"
        for name, place in section.places.items()
    ]
    labels.append('<label><input type="checkbox" name="seeds" autocomplete="off"><span>each seed</span></label>')
    return f'<div class="legend">{"".join(labels)}</div>'


def _numbers(section: Section) -> str:
    """The table of results. Each cell has the numbers by which the script sorts; none where there is no value."""
    headings, lines = summary.table(section.runs)
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(heading)}</button></th>'
        for heading in headings
    )
    body = ""
    for cells, keys in zip(lines, summary.sort_keys(section.runs), strict=True):
        rest = "".join(f'<td data-key="{key}">{escape(cell)}</td>' for cell, key in zip(cells[1:], keys, strict=True))
        body += f"<tr><td>{escape(cells[0])}</td>{rest}</tr>"
    return f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


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
        kinds.setdefault(_pairs(collection.without_command(run).environment), []).append(run)
    return _words(("runs", "environment"), ((str(len(held)), text) for text, held in kinds.items()))


def _pairs(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _words(headings: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    return f'<div class="scroll">{_table(headings, lines)}</div>'


def _table(headings: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<table class="words"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
