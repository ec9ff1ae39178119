"""A workload's part of the user's data folder: what is missing or damaged is named, and no path leaves the folder.

Nothing is ever written there. What takes long to work out can be kept in a folder that the user names by
``NGPLUS_CACHE``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ngplus.lab.workloads.base import DataError

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Folder:
    """The folder of one workload. ``root`` itself may be a link that the user has made; nothing below may lead out."""

    name: str
    root: Path
    help: str  # where to get the data, and how to lay it out

    def missing(self, what: str) -> DataError:
        return DataError(f"{self.name}: there is no {what} in {self.root}.\n{self.help}")

    def path(self, *parts: str) -> Path:
        """A path inside the folder, whether it exists or not."""
        path = self.root.joinpath(*parts)
        if not path.resolve().is_relative_to(self.root):
            raise DataError(f"{self.name}: {path} leads out of the data folder {self.root}")
        return path

    def find(self, *names: str) -> Path | None:
        """The first of these files that is there."""
        return next((path for path in map(self.path, names) if path.is_file()), None)

    def require(self, *names: str) -> Path:
        path = self.find(*names)
        if path is None:
            raise self.missing(" or ".join(names))
        return path

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Errors of any reader become one that names the file."""
        try:
            yield
        except DataError:
            raise
        except FileNotFoundError as error:
            raise self.missing(str(path)) from error
        except (
            OSError,
            EOFError,
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            SyntaxError,
            AttributeError,
        ) as error:
            raise self.damaged(path, f"{type(error).__name__}: {error}") from error
        except (zlib.error, zipfile.BadZipFile, MemoryError, RecursionError, RuntimeError, SystemError) as error:
            raise self.damaged(path, f"{type(error).__name__}: {error}") from error

    def damaged(self, path: Path, reason: str) -> DataError:
        return DataError(f"{self.name}: the file {path} is damaged or in another format ({reason}).")

    def text(self, path: Path) -> str:
        """A text file in UTF-8, gzipped or not."""
        with self.reading(path):
            raw = path.read_bytes()
            return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")

    def json(self, path: Path) -> Any:
        with self.reading(path):
            return json.loads(self.text(path))


def folder(name: str, data: Path | None, help: str, *alternatives: str) -> Folder:
    """``data/<name>``, or the first of the alternatives (the data set's own names) that is there."""
    if data is None:
        raise DataError(f"{name} needs data: set NGPLUS_DATA or --data to the folder that has it.\n{help}")
    for part in (name, *alternatives):
        if (data / part).is_dir():
            return Folder(name, (data / part).resolve(), help)
    raise DataError(f"{name}: there is no folder {name!r} in {data}.\n{help}")


# ------------------------------------------------------------------------------------------------ cache

_memory: dict[str, Arrays] = {}


def cached(sources: Sequence[Path], what: str, settings: Any, make: Callable[[], Arrays]) -> Arrays:
    """Arrays made from files, kept in memory, and on disk where ``NGPLUS_CACHE`` names a folder.

    They are made anew where a file has another path, size or time of change.
    """
    states = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in sources]
    key = hashlib.sha256(json.dumps([what, states, settings], sort_keys=True).encode()).hexdigest()[:24]
    if key not in _memory:
        cache = os.environ.get("NGPLUS_CACHE")
        _memory[key] = _on_disk(Path(cache), sources[0].parent, f"{what}-{key}.npz", make) if cache else make()
    return _memory[key]


def _on_disk(cache: Path, data: Path, name: str, make: Callable[[], Arrays]) -> Arrays:
    if cache.resolve().is_relative_to(data.resolve()):
        raise DataError(f"NGPLUS_CACHE ({cache}) must be outside of the data folder {data}")
    path = cache / name
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as held:
                return {key: held[key] for key in held.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            pass  # made anew below
    arrays = make()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, suffix=".part", delete=False) as part:
        np.savez(part, allow_pickle=False, **arrays)
    os.replace(part.name, path)
    return arrays
