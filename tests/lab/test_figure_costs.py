"""The figure of costs: its formulas against the FLOPs that torch counts, and against the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ngplus
from ngplus.capture.coverage import Coverage

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
from helpers.steps import PAPER
from ngplus.lab import figures
from ngplus.lab.figures import costs

pytestmark = pytest.mark.usefixtures("figure_conditions")


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(("m", "n", "k"), [(6, 9, 1), (12, 5, 1), (6, 30, 4), (6, 9, 40), (12, 5, 7)])
def test_costs_products_against_the_counter(m: int, n: int, k: int) -> None:
    s = 8
    layer = costs.Layer(m, n, k)
    g, a, gradient = torch.randn(s, k, m), torch.randn(s, k, n), torch.randn(m, n)
    left, right = torch.randn(m, m), torch.randn(n, n)

    def kfac_refresh() -> None:
        _ = g.reshape(-1, m).mT @ g.reshape(-1, m), a.reshape(-1, n).mT @ a.reshape(-1, n)

    def shampoo_refresh() -> None:
        _ = gradient @ gradient.mT, gradient.mT @ gradient

    def two_sided() -> None:
        _ = left @ gradient @ right

    def seng_refresh() -> None:
        if k == 1:
            _ = (g[:, 0] @ g[:, 0].mT) * (a[:, 0] @ a[:, 0].mT)
        else:
            u = (g.mT @ a).flatten(1)
            _ = u @ u.mT

    def seng_step() -> None:
        if k == 1:
            projected = ((g[:, 0] @ gradient) * a[:, 0]).sum(1)
            _ = g[:, 0].mT @ ((torch.randn(s, s) @ projected)[:, None] * a[:, 0])
        else:
            u = torch.randn(s, m * n)
            _ = u.mT @ (torch.randn(s, s) @ (u @ gradient.flatten()[:, None]))

    kfac, shampoo, seng = (costs.cost(method, layer, s) for method in ("KFAC", "Shampoo", "SENG"))
    assert counted(kfac_refresh) == kfac.products
    assert counted(two_sided) == kfac.step == shampoo.step
    assert counted(shampoo_refresh) == shampoo.products
    assert counted(seng_refresh) == seng.products
    assert counted(seng_step) == pytest.approx(seng.step, abs=2 * s * s)
    assert kfac.state == left.numel() + right.numel()
    assert shampoo.state == 2 * kfac.state


@pytest.mark.parametrize(
    ("layer", "shape", "slack"),
    [
        (nn.Linear(9, 6, bias=False), (8, 9), 0.0),
        (nn.Linear(5, 12, bias=False), (8, 5), 0.0),
        (nn.Linear(30, 6, bias=False), (8, 4, 30), 0.0),
        (nn.Linear(9, 6, bias=False), (8, 40, 9), 0.0),
        (nn.Conv2d(20, 8, 1, bias=False), (8, 20, 5, 5), 0.0),
        # a 3 x 3 kernel works on whole rows of the image, two columns more than its output has
        (nn.Conv2d(3, 8, 3, bias=False), (8, 3, 12, 12), 0.2),
    ],
)
def test_costs_of_ngplus_against_the_optimizer(
    layer: nn.Module, shape: tuple[int, ...], slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLOPs of a refresh and of a step as torch counts them, and the bytes of the state dict.

    Without the check of what is captured, which of layers as small as these compares all entries.
    """
    monkeypatch.setattr(Coverage, "subtract", lambda *args: None)
    inputs = torch.randn(shape)
    (found,) = costs.layers_of(layer, inputs)
    expected = costs.cost("NG+", found, shape[0])
    base = counted(lambda: layer(inputs).square().mean().backward())
    optimizer = ngplus.NGPlus(layer, solver="dense", momentum=0.0, damping=0.3, update_every=2, **PAPER)

    def one() -> None:
        optimizer.zero_grad()
        layer(inputs).square().mean().backward()
        optimizer.step()

    one()
    without, with_refresh = counted(one), counted(one)
    assert without - base == expected.step
    assert expected.products <= with_refresh - without <= (1 + slack) * expected.products
    state = optimizer.state_dict()["state"][0]
    kept = sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, Tensor) and t.dim() > 1)
    assert kept == 4 * expected.state


def test_costs_of_a_cholesky_inverse_counted() -> None:
    """d^3 / 3 for the factor and 2 d^3 / 3 for the inverse, to leading order: the textbook's loops, counted."""

    def count(d: int) -> tuple[int, int]:
        factor = sum(2 * (d - 1 - j) * (d - j) // 2 for j in range(d))  # rank-one updates of half a matrix
        invert = sum(2 * (d - j) * (d - j + 1) // 2 for j in range(d))  # the inverse of a triangle
        multiply = sum(2 * (d - max(i, j)) for i in range(d) for j in range(i + 1))  # its product, half of it
        return factor, invert + multiply

    d = 200
    factor, rest = count(d)
    assert factor == pytest.approx(d**3 / 3, rel=0.03)
    assert rest == pytest.approx(2 * d**3 / 3, rel=0.03)
    assert costs.cost("NG+", costs.Layer(d, 300), 8).factorisations == d**3


def test_costs_say_what_the_paper_says() -> None:
    """Section 2.4: KFAC's inverses cost more than twice NG+'s, and NG+ stores less than a gradient."""
    for m, n in ((64, 576), (512, 512), (1000, 2049)):
        layer = costs.Layer(m, n)
        own, kfac, shampoo = (costs.cost(method, layer, 32) for method in ("NG+", "KFAC", "Shampoo"))
        assert kfac.factorisations >= 2 * own.factorisations
        assert kfac.step >= 2 * own.step
        assert shampoo.factorisations > kfac.factorisations
        assert own.state <= m * n
        assert own.wire == min(m * m, n * n)
        assert shampoo.wire == 0
    resnet = costs.resnet50()
    assert len(resnet) == 54
    # ResNet-50 has 25,557,032 parameters, 53,120 of them in its norm layers, and 4.1 G multiplications a picture.
    assert sum(layer.m * layer.n for layer in resnet) == 25_557_032 - 53_120
    assert sum(layer.m * layer.n * layer.kappa for layer in resnet) == pytest.approx(4.1e9, rel=0.02)
    assert 4 * costs.total("NG+", resnet, 32).state == pytest.approx(24.6e6, rel=0.01)
    assert 4 * costs.total("KFAC", resnet, 32).state == pytest.approx(615e6, rel=0.01)


def make_model() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(40, 4)), (torch.zeros(6, 5, dtype=torch.long),)


def test_costs_of_any_model() -> None:
    found = costs.layers_of(*(make_model()[0], *make_model()[1]))
    assert found == [costs.Layer(50, 8, 5, rows=True), costs.Layer(4, 41, 1)]
    numbers = costs.compute(model=f"{__name__}:make_model").numbers
    assert numbers["models"][0]["samples"] == 6
    assert numbers["models"][0]["methods"]["NG+"]["state_bytes"] == 4 * (64 + 16)
    for wrong in ("nothing", "no.such:thing", "math:sqrt", "torch.nn:Linear", "torch.nn:Transformer"):
        with pytest.raises(figures.FigureError):
            costs.find(wrong)
