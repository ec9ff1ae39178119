"""The rooms of ngplus: which modules each has, what it may know, and the picture of it, made from the import graph.

    python tools/rooms.py            # says what breaks the rules
    python tools/rooms.py --draw     # writes docs/pictures/rooms.svg and rooms-dark.svg (make pictures)

``tests/test_rooms.py`` keeps the rules. A new module gets a room here.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "ngplus"
PICTURES = SOURCE.parents[1] / "docs" / "pictures"


@dataclass(frozen=True)
class Room:
    """``modules`` are names below ngplus, a package standing for all that is in it; ``knows`` are other rooms."""

    name: str
    purpose: str
    modules: tuple[str, ...]
    knows: tuple[str, ...] = ()


ROOMS = (
    Room("gfim", "factors of G_i to L or R", ("blocks", "factors", "fisher", "sketch")),
    Room("solve", "L and lambda to an inverse", ("faults", "solve"), ("gfim",)),
    Room("layers", "a rule for each layer type", ("layers",), ("gfim",)),
    Room(
        "capture",
        "the model's passes to factors",
        ("calls", "capture", "compiled", "dtensor", "matrices", "watching"),
        ("gfim", "layers"),
    ),
    Room(
        "curvature",
        "L, its average and inverse, as state",
        ("adaptive", "alike", "background", "curvature", "rates"),
        ("gfim", "solve", "capture"),
    ),
    Room("sync", "what crosses ranks", ("sharding", "sharing", "sync"), ("gfim", "solve", "capture", "curvature")),
    Room(
        "optimizer",
        "the step, as in Algorithm 1",
        (
            "bound",
            "captured",
            "drifting",
            "gathering",
            "gradients",
            "groups",
            "health",
            "layout",
            "loads",
            "notices",
            "optimizer",
            "options",
            "plan",
            "preconditioner",
            "steady",
            "study",
            "update",
        ),
        ("gfim", "solve", "layers", "capture", "curvature", "sync"),
    ),
    Room("online", "the method of the regret analysis", ("online",)),
    Room("schedules", "of the damping", ("schedules",)),
    Room(
        "baselines",
        "KFAC and SENG on the same capture",
        ("baselines",),
        ("gfim", "solve", "layers", "capture", "curvature", "optimizer"),
    ),
    Room("lab", "workloads, comparison, report, commands", ("lab", "__main__")),  # and the public names
)
PUBLIC = {
    "ngplus",
    "ngplus.baselines",
    "ngplus.layers",
    "ngplus.online",
    "ngplus.schedules",
}  # what the laboratory may import from
BY_NAME = {room.name: room for room in ROOMS}


@dataclass(frozen=True)
class Import:
    """One import: the module that has it, its line, the module that it names."""

    importer: str
    line: int
    target: str
    names: tuple[str, ...] = ()


def modules() -> dict[str, Path]:
    """All modules of the package, by dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("ngplus", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> list[Import]:
    """All imports of the package, wherever in a module they stand; ``from ngplus import solve`` names ngplus.solve."""
    known, found = modules(), []
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [Import(name, node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None and not node.level, f"{path}: a relative import"  # noqa: PT018
                plain = tuple(a.name for a in node.names if f"{node.module}.{a.name}" not in known)
                inner = [a.name for a in node.names if f"{node.module}.{a.name}" in known]
                found += [Import(name, node.lineno, f"{node.module}.{n}") for n in inner]
                if plain:
                    found.append(Import(name, node.lineno, node.module, plain))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("ngplus"):
                module, colon, attribute = node.value.partition(":")  # an import by name, "ngplus.baselines:KFAC"
                if colon and module in known:
                    found.append(Import(name, node.lineno, module, (attribute,)))
    return found


def room_of(module: str) -> Room | None:
    """The room that a module of ngplus is in; None for the package's front door, ngplus itself."""
    if module == "ngplus":
        return None
    first = module.split(".")[1]
    for room in ROOMS:
        if first in room.modules:
            return room
    raise LookupError(f"{module} has no room: give it one in tools/rooms.py")


def broken(found: Iterable[Import] | None = None) -> list[str]:
    """What breaks the rules, in words."""
    said = []
    standard = sys.stdlib_module_names
    for item in imports() if found is None else found:
        room, top = room_of(item.importer), item.target.split(".")[0]
        if room is None:
            continue
        where = f"{item.importer}, line {item.line}: "
        if top != "ngplus":
            if room.name != "lab" and top not in standard and top != "torch":
                said.append(f"{where}the core imports torch only, not {item.target}")
            continue
        target = room_of(item.target)
        if target is room:
            continue
        if room.name == "lab":
            if item.target not in PUBLIC:
                said.append(f"{where}the laboratory uses the public names only, not {item.target}")
        elif target is None:
            said.append(f"{where}the core does not import from its own front door")
        elif target.name not in room.knows:
            said.append(f"{where}{room.name} may not know {target.name} ({item.target})")
    return said


def links(found: Iterable[Import] | None = None) -> set[tuple[str, str]]:
    """Which room imports which."""
    pairs = set()
    for item in imports() if found is None else found:
        if not item.target.startswith("ngplus"):
            continue
        room, target = room_of(item.importer), room_of(item.target)
        if room is None:
            continue
        if room.name == "lab" and target is None:  # the front door leads to these
            pairs.add(("lab", "optimizer"))
        elif target is not None and target is not room:
            pairs.add((room.name, target.name))
    return pairs


# -------------------------------------------------------------------------------------------------- the picture


def levels(pairs: set[tuple[str, str]]) -> dict[str, int]:
    """How far below the top each room is: just below the lowest room that imports it."""
    above = {room.name: {a for a, b in pairs if b == room.name} for room in ROOMS}
    above["schedules"] = above["schedules"] or {"lab"}  # for users; nothing here imports it

    def level(name: str) -> int:
        return 1 + max((level(other) for other in above[name]), default=-1)

    return {name: level(name) for name in above}


def direct(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The links that no longer way implies: a picture of all of them could not be read."""

    def reaches(a: str, b: str) -> bool:
        return any(x == a and (y == b or reaches(y, b)) for x, y in pairs)

    return {(a, b) for a, b in pairs if not any(x == a and y != b and reaches(y, b) for x, y in pairs)}


def draw(dark: bool) -> str:
    """The rooms as boxes, who knows whom as arrows; the laboratory on top, what knows nothing at the bottom."""
    ink, faint, paper, box, edge, accent = (
        ("#e6e8ee", "#9aa3b5", "#1b1e27", "#272c39", "#4a5266", "#ff7aa8")
        if dark
        else ("#1d2330", "#5b6577", "#ffffff", "#f4f5f8", "#c3c9d6", "#c2185b")
    )
    found = imports()
    pairs = links(found)
    level = levels(pairs)
    rows = [[room for room in ROOMS if level[room.name] == n] for n in range(max(level.values()) + 1)]
    names = {room.name: ", ".join(room.modules) if room.modules != (room.name,) else "" for room in ROOMS}
    lines = {name: textwrap.wrap(text, 44) for name, text in names.items()}
    width, wide, high, gap = 860, 256, 48 + 13 * max(map(len, lines.values())), 32
    across = wide + 20
    height = len(rows) * (high + gap) - gap + 40
    place: dict[str, tuple[float, float]] = {}
    for n, row in enumerate(rows):
        span = len(row) * across - 20
        for i, room in enumerate(row):
            place[room.name] = ((width - span) / 2 + i * across, 20 + n * (high + gap))
    title = "The rooms of ngplus, and which of them imports which"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        'font-family="system-ui, sans-serif">',
        f'<rect width="{width}" height="{height}" rx="10" fill="{paper}"/>',
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{faint}"/></marker></defs>',
    ]
    for a, b in sorted(direct(pairs)):
        (ax, ay), (bx, by) = place[a], place[b]
        x1, y1, x2, y2 = ax + wide / 2, ay + high, bx + wide / 2, by - 2
        bend = f"{x1:.0f} {y2 - 10:.0f} {x2:.0f} {y2 - 24:.0f} {x2:.0f} {y2:.0f}"
        out.append(
            f'<path d="M{x1:.0f} {y1:.0f} V{y2 - gap + 2:.0f} C{bend}" fill="none" '
            f'stroke="{faint}" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    for room in ROOMS:
        x, y = place[room.name]
        out += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{wide}" height="{high}" rx="8" fill="{box}" stroke="{edge}"/>',
            f'<text x="{x + 12:.0f}" y="{y + 20:.0f}" font-size="14" font-weight="600" fill="{accent}">'
            f"{room.name}</text>",
            f'<text x="{x + 12:.0f}" y="{y + 36:.0f}" font-size="10.5" fill="{ink}">{room.purpose}</text>',
        ]
        out += [
            f'<text x="{x + 12:.0f}" y="{y + 52 + 13 * i:.0f}" font-size="9.5" fill="{faint}">{line}</text>'
            for i, line in enumerate(lines[room.name])
        ]
    return "\n".join([*out, "</svg>", ""])


def pictures() -> dict[Path, str]:
    return {PICTURES / "rooms.svg": draw(dark=False), PICTURES / "rooms-dark.svg": draw(dark=True)}


if __name__ == "__main__":
    if "--draw" in sys.argv:
        for path, text in pictures().items():
            path.write_text(text)
    problems = broken()
    print("\n".join(problems) or f"{len(modules())} modules in {len(ROOMS)} rooms, no rule broken")
    sys.exit(bool(problems))
