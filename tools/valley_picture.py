"""The picture of a narrow valley in docs/method.md: SGD and NG+ on a least-squares problem with two weights.

    python tools/valley_picture.py    # make pictures; it prints the learning rates and the losses

Both run 15 steps without momentum on all samples, from the same point, with the best of 25 learning rates by the loss
at the end. The contours are those of the loss itself.
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import ngplus

sys.path.insert(0, str(Path(__file__).parent))
from method_pictures import DARK, LIGHT, PICTURES, Drawing

STEPS = 15
RATES = [10 ** (-3 + 0.25 * i) for i in range(25)]  # 0.001 to 1,000


def problem() -> tuple[Tensor, Tensor]:
    """y = x W^T with inputs that are 6 times as wide in one direction as in the other, and a little noise."""
    torch.manual_seed(0)
    angle = math.radians(-20)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    x = torch.randn(400, 2, dtype=torch.float64) * torch.tensor([0.5, 3.0], dtype=torch.float64) @ turn.T
    return x, x @ torch.tensor([[2.2], [0.3]], dtype=torch.float64) + 0.3 * torch.randn(400, 1, dtype=torch.float64)


def run(method: str, rate: float, x: Tensor, y: Tensor) -> tuple[list[tuple[float, float]], float]:
    """The way of the weights, and the loss at the end."""
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-2.6, 1.5]]))
    optimizer: torch.optim.Optimizer
    if method == "SGD":
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    else:  # the side of the two inputs, since on the other one L is a single number; R of the first step is kept
        options = {
            "momentum": 0.0,
            "curvature": "sample",
            "graft": None,
            "relative_damping": 0.1,
            "update_every": STEPS,
            "side": "right",
        }
        optimizer = ngplus.NGPlus(layer, lr=rate, **options)  # type: ignore[arg-type]
    way = [tuple(layer.weight.detach()[0].tolist())]
    warnings.simplefilter("ignore", ngplus.HealthWarning)  # some rates are far too large
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x), y).backward()
        optimizer.step()
        way.append(tuple(layer.weight.detach()[0].tolist()))
    return way, nn.functional.mse_loss(layer(x), y).item()


def best(method: str, x: Tensor, y: Tensor) -> tuple[float, list[tuple[float, float]], float]:
    tried = [(rate, *run(method, rate, x, y)) for rate in RATES]
    return min((t for t in tried if math.isfinite(t[2])), key=lambda t: t[2])


def drawing(
    width: int,
    height: int,
    scale: float,
    colours: dict[str, str],
    found: dict[str, tuple[float, list[tuple[float, float]], float]],
    floor: float,
    bottom: Tensor,
    values: Tensor,
    axes: Tensor,
) -> str:
    d = Drawing(width, height, "SGD and NG+ in a narrow valley", colours)

    def at(w: tuple[float, float]) -> tuple[float, float]:
        return width / 2 + scale * w[0], height / 2 - scale * (w[1] - 0.9)

    tilt = -math.degrees(math.atan2(axes[1, 0].item(), axes[0, 0].item()))
    cx, cy = at((bottom[0].item(), bottom[1].item()))
    d.parts.append(f'<clipPath id="paper"><rect width="{width}" height="{height}" rx="10"/></clipPath>')
    d.parts.append('<g clip-path="url(#paper)">')
    for level in (0.02, 0.1, 0.4, 1.0, 2.0, 3.5, 6.0, 9.0):
        rx, ry = (scale * math.sqrt(level / v) for v in values.tolist())
        d.parts.append(
            f'<ellipse cx="{cx:.0f}" cy="{cy:.0f}" rx="{rx:.0f}" ry="{ry:.0f}" fill="none" '
            f'stroke="{colours["line"]}" transform="rotate({tilt:.1f} {cx:.0f} {cy:.0f})"/>'
        )
    for method, colour in (("SGD", "g"), ("NG+", "l")):
        points = [at(w) for w in found[method][1]]
        line = " ".join(f"{px:.0f},{py:.0f}" for px, py in points)
        d.parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[colour]}" stroke-width="2"/>')
        d.parts += [f'<circle cx="{a:.0f}" cy="{b:.0f}" r="3.5" fill="{colours[colour]}"/>' for a, b in points]
    d.parts.append("</g>")
    for i, (method, colour) in enumerate((("SGD", "g"), ("NG+", "l"))):
        rate, _, loss = found[method]
        words = f"{method}: {loss - floor:.1g} above the lowest loss (lr {rate:.2g})"
        d.text(18, height - 44 + 24 * i, words, 14, colour, middle=False, bold=True)
    return d.svg()


def pictures() -> tuple[dict[Path, str], list[str]]:
    x, y = problem()
    found = {method: best(method, x, y) for method in ("SGD", "NG+")}
    hessian = x.T @ x / len(x)
    values, axes = torch.linalg.eigh(hessian)
    bottom = torch.linalg.solve(hessian, x.T @ y / len(x))[:, 0]
    floor = (x @ bottom[:, None] - y).square().mean().item()
    drawn = {}
    for size, width, height, scale in (("", 860, 380, 120.0), ("-narrow", 400, 300, 56.0)):
        for end, colours in (("", LIGHT), ("-dark", DARK)):
            picture = drawing(width, height, scale, colours, found, floor, bottom, values, axes)
            drawn[PICTURES / f"method-valley{size}{end}.svg"] = picture
    said = [f"{m}: lr {rate:.3g}, loss {loss:.6f}, lowest {floor:.6f}" for m, (rate, _, loss) in found.items()]
    return drawn, said


if __name__ == "__main__":
    made, lines = pictures()
    for path, text in made.items():
        path.write_text(text)
    print("\n".join(lines))
