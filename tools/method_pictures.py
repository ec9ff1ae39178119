"""The schematic pictures of docs/method.md, light and dark, wide and narrow: make pictures."""

from __future__ import annotations

from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
LIGHT = {"ink": "#1d2330", "faint": "#5b6577", "paper": "#ffffff", "line": "#c3c9d6", "w": "#d7dbe5", "g": "#1769c9", "a": "#0b8043", "l": "#c2185b"}  # noqa: E501  # fmt: skip
DARK = {"ink": "#e6e8ee", "faint": "#9aa3b5", "paper": "#1b1e27", "line": "#4a5266", "w": "#343b4b", "g": "#6aa9ff", "a": "#5cc98a", "l": "#ff7aa8"}  # noqa: E501  # fmt: skip


class Drawing:
    """SVG by a few words. Coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str, colours: dict[str, str]) -> None:
        self.colours = colours
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
            'font-family="system-ui, sans-serif">',
            f'<rect width="{width}" height="{height}" rx="10" fill="{colours["paper"]}"/>',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{colours["faint"]}"/></marker></defs>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, opacity: float = 1.0, cells: int = 0) -> None:
        colour = self.colours[fill]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{colour}" fill-opacity="{opacity:g}" '
            f'stroke="{colour}" stroke-width="1.2"/>'
        )
        for i in range(1, cells):
            at = x + w * i / cells
            self.parts.append(
                f'<path d="M{at:g} {y:g}V{y + h:g}" stroke="{self.colours["paper"]}" stroke-opacity="0.6"/>'
            )

    def text(self, x: float, y: float, words: str, size: float = 13, fill: str = "ink", middle: bool = True,
             bold: bool = False) -> None:  # fmt: skip
        anchor = "middle" if middle else "start"
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight} '
            f'fill="{self.colours[fill]}">{words}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{self.colours["faint"]}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def sub(name: str, below: str) -> str:
    """A letter with an index."""
    return f'{name}<tspan font-size="70%" dy="4">{below}</tspan><tspan dy="-4"> </tspan>'


def layer(colours: dict[str, str], narrow: bool) -> str:
    """A layer's input and output gradient, their product, and the two means of its squares, of which one is kept. In
    a narrow picture the three parts are below each other."""
    size = (400, 660) if narrow else (860, 300)
    d = Drawing(*size, "From a layer's input and output gradient to L and R", colours)
    parts = [(65, 0), (-195, 215), (-475, 430)] if narrow else [(0, 0), (0, 0), (0, 0)]

    x, y = parts[0]
    d.text(x + 135, y + 34, "1. the layer, one sample", 13, "faint")
    d.box(x + 40, y + 70, 16, 90, "g", 0.75)
    d.text(x + 48, y + 180, sub("g", "i"), 14, "g", bold=True)
    d.text(x + 22, y + 120, "m", 12, "faint")
    d.text(x + 78, y + 120, "×", 18)
    d.box(x + 98, y + 107, 130, 16, "a", 0.75)
    d.text(x + 163, y + 145, sub("a", "i") + "and a 1 for the bias", 12, "a")
    d.text(x + 163, y + 96, "n", 12, "faint")

    x, y = parts[1]
    d.text(x + 372, y + 34, "2. its gradient, a matrix", 13, "faint")
    d.box(x + 300, y + 70, 130, 90, "w")
    d.box(x + 418, y + 70, 12, 90, "line")
    d.text(x + 358, y + 121, sub("G", "i") + "= " + sub("g", "i") + sub("a", "i") + "ᵀ", 15)
    d.text(x + 365, y + 180, "m × n, often not formed", 12, "faint")
    d.text(x + 424, y + 64, "b", 12, "faint")

    x, y = parts[2]
    d.text(x + 675, y + 34, "3. means over samples: one is kept", 13, "faint")
    d.box(x + 510, y + 70, 90, 90, "l", 0.35)
    d.text(x + 555, y + 121, "L", 20, "ink", bold=True)
    d.text(x + 555, y + 180, "mean of GᵢGᵢᵀ", 12, "faint")
    d.text(x + 555, y + 197, "m × m", 12, "faint")
    d.text(x + 655, y + 121, "or", 14, "faint")
    d.box(x + 710, y + 50, 130, 130, "l", 0.8)
    d.text(x + 775, y + 121, "R", 20, "paper", bold=True)
    d.text(x + 775, y + 198, "mean of GᵢᵀGᵢ, n × n", 12, "faint")
    if narrow:
        d.arrow(200, 212, 200, 236)
        d.arrow(200, 412, 200, 444)
        return d.svg()
    d.arrow(244, 115, 284, 115)
    d.arrow(446, 115, 486, 115)
    d.text(430, 246, "L = mean of ‖aᵢ‖² gᵢgᵢᵀ   or   R = mean of ‖gᵢ‖² aᵢaᵢᵀ:", 15)
    d.text(430, 272, "one product of a tall matrix with itself, and nothing of the size of all Gᵢ", 12, "faint")
    return d.svg()


def time(colours: dict[str, str], narrow: bool) -> str:
    """In which steps the two optimizers refresh."""
    steps, pitch = (16, 22.4) if narrow else (31, 26.5)
    d = Drawing(round(44 + steps * pitch), 222, "In which steps NGPlus and NGAdam refresh", colours)
    rows = (
        (60, "NGPlus: new R and its inverse every 10 steps", 10),
        (160, "NGAdam: new roots of L and R every 5 steps", 5),
    )
    for y, words, every in rows:
        d.text(22, y - 18, words, 14, "faint", middle=False)
        for k in range(1, steps + 1):
            x = 22 + pitch * (k - 1)
            due = (k - 1) % every == 0 or (every == 5 and k in (2, 3, 4, 6))
            d.box(x, y, pitch - 4, 44, "l" if due else "w", 0.85 if due else 1.0)
            d.text(x + pitch / 2 - 2, y + 27, str(k), 12, "paper" if due else "faint", bold=due)
    return d.svg()


def pictures() -> dict[Path, str]:
    return {
        PICTURES / f"method-{name}{width}{end}.svg": draw(colours, narrow)
        for name, draw in {"layer": layer, "time": time}.items()
        for width, narrow in (("", False), ("-narrow", True))
        for end, colours in (("", LIGHT), ("-dark", DARK))
    }


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
