"""The schematic pictures of docs/method.md, light and dark: make pictures."""

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


def layer(colours: dict[str, str]) -> str:
    """A layer's input and output gradient, their product, and its two squares, of which the smaller one is kept."""
    d = Drawing(860, 300, "From a layer's input and output gradient to L", colours)
    d.text(95, 34, "1. the layer, one sample", 13, "faint")
    d.box(40, 70, 16, 90, "g", 0.75)
    d.text(48, 180, sub("g", "i"), 14, "g", bold=True)
    d.text(48, 200, "m", 12, "faint")
    d.text(78, 120, "×", 18)
    d.box(98, 107, 130, 16, "a", 0.75)
    d.text(163, 145, sub("a", "i") + "and a 1 for the bias", 12, "a")
    d.text(163, 96, "n", 12, "faint")
    d.arrow(244, 115, 284, 115)
    d.text(370, 34, "2. its gradient, a matrix", 13, "faint")
    d.box(300, 70, 130, 90, "w")
    d.box(418, 70, 12, 90, "line")
    d.text(358, 121, sub("G", "i") + "= g a", 15)
    d.text(365, 180, "m x n, often not formed", 12, "faint")
    d.text(424, 64, "b", 12, "faint")
    d.arrow(446, 115, 486, 115)
    d.text(660, 34, "3. means over samples: one of them is kept", 13, "faint")
    d.box(510, 70, 90, 90, "l", 0.35)
    d.text(555, 121, "L", 20, "ink", bold=True)
    d.text(555, 180, "m x m: with", 12, "faint")
    d.text(555, 197, 'side="left"', 12, "faint")
    d.text(655, 121, "or", 14, "faint")
    d.box(710, 50, 130, 130, "l", 0.8)
    d.text(775, 121, "R", 20, "paper", bold=True)
    d.text(775, 200, "n x n, the inputs' side:", 12, "l")
    d.text(775, 216, "kept, in blocks", 12, "l")
    d.text(430, 252, "L = mean of GᵢGᵢᵀ = mean of ‖aᵢ‖² gᵢgᵢᵀ   or   R = mean of GᵢᵀGᵢ = mean of ‖gᵢ‖² aᵢaᵢᵀ", 15)
    d.text(430, 278, "each is one product of a tall matrix with itself, and nothing of the size of all Gᵢ", 12, "faint")
    return d.svg()


def step(colours: dict[str, str]) -> str:
    """The gradient of the mini-batch times the inverse of L, and the momentum between the roots of L and R."""
    d = Drawing(860, 330, "The step: the inverse of L, or the inverse square roots of L and R", colours)
    d.text(30, 36, "NGPlus, the paper: the smaller side", 13, "faint", middle=False)
    d.box(30, 60, 80, 80, "l", 0.8)
    d.text(70, 105, "(λI + L)⁻¹", 13, "paper", bold=True)
    d.text(126, 106, "×", 18)
    d.box(142, 60, 120, 80, "w")
    d.text(202, 106, "G", 18)
    d.arrow(276, 100, 316, 100)
    d.box(330, 60, 120, 80, "g", 0.75)
    d.text(390, 106, "direction", 14, "paper", bold=True)
    d.text(470, 90, "long along small eigenvalues of L,", 12, "faint", middle=False)
    d.text(470, 108, "short along large ones", 12, "faint", middle=False)
    d.text(30, 184, "NGAdam: both sides", 13, "faint", middle=False)
    d.box(30, 210, 80, 80, "l", 0.8)
    d.text(70, 247, "√tr(L) ·", 12, "paper", bold=True)
    d.text(70, 265, "(L + λI)^-½", 12, "paper", bold=True)
    d.text(126, 256, "×", 18)
    d.box(142, 210, 120, 80, "w")
    d.text(202, 256, "M", 18)
    d.text(278, 256, "×", 18)
    d.box(294, 190, 120, 120, "l", 0.35)
    d.text(354, 255, "(R + λI)^-½", 14, "ink", bold=True)
    d.arrow(428, 250, 468, 250)
    d.box(482, 210, 120, 80, "g", 0.75)
    d.text(542, 256, "direction", 14, "paper", bold=True)
    d.text(622, 232, "M: Nesterov momentum", 12, "faint", middle=False)
    d.text(622, 250, "L, R: moving averages of", 12, "faint", middle=False)
    d.text(622, 268, "GGᵀ and GᵀG", 12, "faint", middle=False)
    return d.svg()


def time(colours: dict[str, str]) -> str:
    """In which steps the two optimizers refresh."""
    d = Drawing(860, 236, "In which steps NGPlus and NGAdam refresh", colours)
    rows = (
        (60, "NGPlus, update_every = 10: hooks read the layers, new R, new inverse", (1, 11, 21, 31)),
        (166, "NGAdam, update_every = 5: new roots; L and R take in the gradient of every step", (1, 2, 3, 4, 6, 11, 16, 21, 26, 31)),  # noqa: E501
    )  # fmt: skip
    for y, words, refreshes in rows:
        d.text(22, y - 18, words, 13, "faint", middle=False)
        for k in range(1, 32):
            x, due = 22 + 26.5 * (k - 1), k in refreshes
            d.box(x, y, 22.5, 44, "l" if due else "w", 0.85 if due else 1.0)
            d.text(x + 11.25, y + 27, str(k), 11, "paper" if due else "faint", bold=due)
    return d.svg()


def pictures() -> dict[Path, str]:
    drawn = {"layer": layer, "step": step, "time": time}
    return {
        PICTURES / f"method-{name}{end}.svg": draw(colours)
        for name, draw in drawn.items()
        for end, colours in (("", LIGHT), ("-dark", DARK))
    }


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
