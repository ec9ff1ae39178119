"""The public interface in one file: every public name with its signature, for the test that it changes on purpose only.

    make interface                                     # writes tests/public_interface.txt anew
    PYTHONPATH=src python tools/public_interface.py    # the same without make; --check compares

A line is a name and its signature; a class has a line for each public method and property of its own or of a class of
ngplus that it builds on.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ngplus

FILE = Path(__file__).resolve().parents[1] / "tests" / "public_interface.txt"
HEAD = "# Made by `make interface`. A change here is a change of the public interface: CHANGELOG.md says so, too.\n"


def lines() -> Iterator[str]:
    yield from module_lines("ngplus", ngplus)


def module_lines(place: str, module: Any) -> Iterator[str]:
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield from module_lines(f"{place}.{name}", thing)
        elif inspect.isclass(thing):
            yield from class_lines(f"{place}.{name}", thing)
        else:
            yield f"{place}.{name}{signature(thing)}"


def class_lines(name: str, cls: type) -> Iterator[str]:
    yield f"class {name}{signature(cls)}"
    public = [base for base in cls.__mro__[1:] if is_public(base)]
    inherited = {key: signature_of(base, key) for base in reversed(public) for key in members(base)}
    for key in sorted(members(cls)):
        said = signature_of(cls, key)
        if inherited.get(key) != said:
            yield f"    {key}{said}"


def is_public(cls: type) -> bool:
    modules = (ngplus, ngplus.layers, ngplus.online, ngplus.reference, ngplus.schedules, ngplus.baselines)
    return any(getattr(module, cls.__name__, None) is cls for module in modules)


def members(cls: type) -> set[str]:
    """The public members that ngplus gives a class, not those of torch or of Python."""
    mine = [vars(base) for base in cls.__mro__ if base.__module__.startswith("ngplus")]
    return {key for names in mine for key in names if not key.startswith("_")}


def signature_of(cls: type, key: str) -> str:
    value = inspect.getattr_static(cls, key)
    if isinstance(value, classmethod | staticmethod):
        return signature(value.__func__)
    return signature(value) if inspect.isfunction(value) else ""


def signature(thing: Any) -> str:
    """As it is written, on one line, or with a line for each argument where that is too long."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return ""
    found = inspect.signature(thing)
    arguments = [_plain(str(parameter)) for parameter in found.parameters.values()]
    kinds = [parameter.kind for parameter in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = "" if found.return_annotation in (found.empty, None, "None") else f" -> {_plain(found.return_annotation)}"
    line = f"({', '.join(arguments)}){result}"
    return line if len(line) < 100 else "(\n        " + ",\n        ".join(arguments) + f"\n    ){result}"


def _plain(annotation: Any) -> str:
    """Without the quotes and wrappers that differ between versions of Python."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", re.sub(r": '([^']*)'", r": \1", text))


def text() -> str:
    return HEAD + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if FILE.read_text() == text() else f"{FILE.name} is old: make interface")
    FILE.write_text(text())
