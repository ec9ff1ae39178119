"""Tuned settings, a JSON file for each workload, with the study that found them.

``presets`` in the working folder, where ``ngplus tune`` writes, comes before the files that ship with ngplus::

    {"workload": "digits", "presets": {"small": {"adam": {"hyper": {"lr": 0.01}, "run": {}, "tuning": {...}}}}}

``run`` may change ``steps``, ``schedule``, ``warmup`` and ``damping_decay`` where a published recipe has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ngplus.lab.runs import Config, RunError, is_number, read_json, write_json

LOCAL = Path("presets")
SHIPPED = Path(__file__).parent
WHOLE = {"steps": 1, "warmup": 0}  # whole numbers of a run, and the least of each


@dataclass(frozen=True)
class Tuned:
    hyper: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] | None = None


def lookup(workload: str, preset: str, optimizer: str, folder: Path | None = None) -> Tuned | None:
    """The tuned settings; None where nobody has tuned this optimizer."""
    for place in (folder or LOCAL, SHIPPED):
        entry = _read(place / f"{workload}.json").get(preset, {}).get(optimizer)
        if entry is not None:
            hyper, run = (entry.get(key) for key in ("hyper", "run")) if isinstance(entry, dict) else (None, None)
            if not isinstance(hyper, dict) or not isinstance(run, dict) or not all(map(_fits, run, run.values())):
                raise RunError(
                    f"{place / f'{workload}.json'} has a damaged entry for {optimizer}. Remove it, or run ngplus tune "
                    "again"
                )
            return Tuned(hyper, run, entry.get("tuning"))
    return None


def _fits(name: str, value: Any) -> bool:
    """May a recipe change it in this way?"""
    if name in WHOLE:
        return isinstance(value, int) and not isinstance(value, bool) and value >= WHOLE[name]
    return isinstance(value, str) if name == "schedule" else name == "damping_decay" and is_number(value)


def check_folder(folder: Path | None = None) -> None:
    """Raises RunError if settings cannot be written to the folder. Called before a study begins."""
    place = folder or LOCAL
    try:
        place.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise RunError(
            f"Settings cannot be written to {place}: {error}. Choose another folder with --presets"
        ) from error


def store(run: Config, tuned: Tuned, folder: Path | None = None) -> Path:
    """Writes the entry for that workload, size and optimizer into its file, beside the ones that are there."""
    path = (folder or LOCAL) / f"{run.workload}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _read(path)
    content.setdefault(run.preset, {})[run.optimizer] = {
        "hyper": dict(tuned.hyper),
        "run": dict(tuned.run),
        "tuning": tuned.tuning,
    }
    write_json(path, {"workload": run.workload, "presets": content})
    return path


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    held = content.get("presets") if isinstance(content, dict) else None
    if not isinstance(held, dict) or not all(isinstance(entry, dict) for entry in held.values()):
        raise RunError(f"{path} is not a file of presets. Remove it, or choose another folder with --presets")
    return held
