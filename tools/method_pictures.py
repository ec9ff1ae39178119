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


def basis(side: str, turned: str) -> str:
    """Q with the side as its index, turned or not."""
    return f'Q<tspan font-size="70%" dy="4">{side}</tspan><tspan dy="-4">{turned or "&#8203;"}</tspan>'


def layer(colours: dict[str, str]) -> str:
    """A layer's input and output gradient, their product, and its two squares: the smaller one, or both."""
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
    d.text(660, 34, "3. means over samples, on one side or both", 13, "faint")
    d.box(510, 70, 90, 90, "l", 0.8)
    d.text(555, 121, "L", 20, "paper", bold=True)
    d.text(555, 180, "m x m, the smaller", 12, "l")
    d.text(555, 197, "one: kept", 12, "l")
    d.text(655, 121, "and", 14, "faint")
    d.box(710, 50, 130, 130, "l", 0.35)
    d.text(775, 121, "R", 20, "ink", bold=True)
    d.text(775, 200, "n x n, the larger: kept,", 12, "faint")
    d.text(775, 216, "above 160 rows in blocks", 12, "faint")
    d.text(430, 252, "L = mean of GᵢGᵢᵀ = mean of ‖aᵢ‖² gᵢgᵢᵀ   and   R = mean of GᵢᵀGᵢ = mean of ‖gᵢ‖² aᵢaᵢᵀ", 15)
    d.text(430, 278, "each is one product of a tall matrix with itself, and nothing of the size of all Gᵢ", 12, "faint")
    return d.svg()


def step(colours: dict[str, str]) -> str:
    """The gradient of the mini-batch, turned by L: the paper's inverse, and the default with both bases."""
    d = Drawing(860, 350, "The step: the inverse of L, or the eigenbases of L and R", colours)
    d.text(30, 36, "scaling=&quot;inverse&quot;, the paper: the smaller side", 13, "faint", middle=False)
    d.box(30, 60, 80, 80, "l", 0.8)
    d.text(70, 105, "(λI + L)⁻¹", 13, "paper", bold=True)
    d.text(126, 106, "×", 18)
    d.box(142, 60, 120, 80, "w")
    d.text(202, 106, "G", 18)
    d.arrow(276, 100, 316, 100)
    d.box(330, 60, 120, 80, "g", 0.75)
    d.text(390, 106, "direction", 14, "paper", bold=True)
    d.text(470, 90, "flat directions, small in L, are", 12, "faint", middle=False)
    d.text(470, 108, "made long; steep ones short", 12, "faint", middle=False)
    d.text(30, 184, "scaling=&quot;adaptive&quot;, the default: both sides", 13, "faint", middle=False)
    _turned(d, 30, "ᵀ", "", "G", "w", "ink")
    d.arrow(318, 250, 340, 250)
    d.box(350, 210, 120, 80, "a", 0.75)
    d.text(410, 246, "Adam's two", 13, "paper", bold=True)
    d.text(410, 263, "moments", 13, "paper", bold=True)
    d.text(410, 305, "the second by rows and columns", 11, "faint")
    d.arrow(478, 250, 496, 250)
    _turned(d, 502, "", "ᵀ", "step", "g", "paper")
    d.text(788, 240, "= the", 12, "faint", middle=False)
    d.text(788, 256, "direction", 12, "faint", middle=False)
    d.text(430, 322, "Q: the eigenvectors of L and of R. The gradient is looked at in the curvature's own axes, and turned back.", 12, "faint")  # noqa: E501  # fmt: skip
    d.text(430, 338, "With one side, one Q; with none, for vectors and plain tables, this is Adam", 12, "faint")
    return d.svg()


def _turned(d: Drawing, x: float, left: str, right: str, middle: str, fill: str, ink: str) -> None:
    """A matrix between the bases of its two sides."""
    d.box(x, 220, 60, 60, "l", 0.8)
    d.text(x + 30, 256, basis("L", left), 17, "paper", bold=True)
    d.box(x + 68, 220, 110, 60, fill, 1.0 if fill == "w" else 0.75)
    d.text(x + 123, 256, middle, 17 if fill == "w" else 14, ink, bold=fill != "w")
    d.box(x + 186, 200, 92, 92, "l", 0.35)
    d.text(x + 232, 252, basis("R", right), 17, "ink", bold=True)


def time(colours: dict[str, str]) -> str:
    """Steps in time: the capture is armed in one of T, and early at powers of five."""
    d = Drawing(860, 226, "Steps in time: the curvature is made anew in one of T, and early at the beginning", colours)
    for k in range(31):
        x, due, early = 22 + 27 * k, k in (0, 25), k in (1, 5)
        d.box(x, 60, 23, 44, "l" if due or early else "w", 0.85 if due else 0.4 if early else 1.0)
        d.text(x + 11.5, 87, str(k), 11, "paper" if due else "ink" if early else "faint", bold=due or early)
        if due or early:
            d.text(
                x + (2 if k == 0 else 11.5),
                48 if k != 1 else 34,
                "refresh" if due else "early",
                11,
                "l" if due else "faint",
            )
    d.arrow(33.5, 106, 33.5, 132)
    d.text(22, 150, "hooks read inputs and output", 12, "faint", middle=False)
    d.text(22, 166, "gradients; new L and R, new bases", 12, "faint", middle=False)
    d.text(440, 132, "elsewhere the hooks return at once; the bases are kept,", 12, "faint")
    d.text(440, 148, "and every step turns its own gradient", 12, "faint")
    d.arrow(708.5, 106, 708.5, 132)
    d.text(708.5, 150, "20 after the last early one;", 12, "faint")
    d.text(708.5, 166, "then 45, 65, ...", 12, "faint")
    d.text(430, 196, "update_every = T = 20, refreshes after 1 and 5 steps, too", 13)
    d.text(430, 214, "each enters the average: 0.5 of the old one, 0.5 of the new", 12, "faint")
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
