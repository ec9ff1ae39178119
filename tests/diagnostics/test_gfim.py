"""gfim(): exact curvature for study, which leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.steps import conv_net, data, loss_fn
from ngplus.capture import reasons


def test_gfim_folds_rows_into_samples() -> None:
    """A layer that sees two rows a sample, as after flatten(0, 1), has as many samples as the model was called with."""

    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 2, bias=False), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x.flatten(0, 1)).unflatten(0, (len(x), 2)).flatten(1))

    torch.manual_seed(0)
    model, x, y = Folding().double(), torch.randn(5, 2, 3).double(), torch.randn(5, 1).double()
    found = ngplus.gfim(model, nn.functional.mse_loss, x, y)["inner.weight"]
    wanted = torch.zeros(2, 2).double()
    for i in range(5):
        (gradient,) = torch.autograd.grad(nn.functional.mse_loss(model(x[i : i + 1]), y[i : i + 1]), model.inner.weight)
        wanted += gradient @ gradient.mT / 5
    torch.testing.assert_close(found.matrix, wanted)


def test_gfim_touches_nothing() -> None:
    model = conv_net().eval()
    x, y = data(2, 4, 4)
    mean = model[1].running_mean.clone()
    found = ngplus.gfim(model, loss_fn, x, y)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert torch.equal(mean, model[1].running_mean)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gfim_leaves_every_module_in_its_mode() -> None:
    model = conv_net()
    model[1].eval()  # frozen statistics
    ngplus.gfim(model, loss_fn, *data(2, 4, 4))
    assert [module.training for module in model] == [True, False, True, True, True]


@pytest.mark.parametrize("bad", [{"side": "both"}, {"side": "up"}, {"loss_reduction": "none"}], ids=str)
def test_gfim_refuses_what_it_does_not_know(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(bad))}: .*one of"):
        ngplus.gfim(conv_net(), loss_fn, *data(2, 4, 4), **bad)


def test_gfim_takes_several_inputs_and_names() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.a(left * right)

    model, left, right, y = Two(), torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 2)
    as_tuple = ngplus.gfim(model, loss_fn, (left, right), y)["a.weight"].matrix
    as_names = ngplus.gfim(model, loss_fn, {"left": left, "right": right}, y)["a.weight"].matrix
    torch.testing.assert_close(as_tuple, as_names)
    torch.testing.assert_close(
        as_tuple, ngplus.gfim(nn.Sequential(model.a), loss_fn, left * right, y)["0.weight"].matrix
    )


class Mixed(nn.Module):
    """A table that a function uses as well, a recurrent layer, a layer that is not called, and plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.recurrent, self.plain = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 4)
        self.scale, self.unused = nn.PReLU(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale(self.plain(self.recurrent(self.table(x))[0].mean(1)))
        return nn.functional.linear(hidden, self.table.weight)


def test_gfim_says_which_are_mini_batch_products() -> None:
    torch.manual_seed(0)
    model, x = Mixed().double(), torch.randint(9, (5, 6))
    found = ngplus.gfim(model, lambda y, _: y.square().mean(), x, None)
    assert found.keys() == found.sources.keys() == {name for name, _ in model.named_parameters()}
    assert {name for name, source in found.sources.items() if source == "sample"} == {"plain.weight", "plain.bias"}
    assert found.sources["scale.weight"] == "vmap"
    batch = {name for name, source in found.sources.items() if source == "batch"}
    assert batch == found.notes.keys()
    assert found.notes["table.weight"] == reasons.OTHER_USES
    assert found.notes["unused.bias"] == reasons.NOT_CALLED
    assert reasons.without_detail(found.notes["recurrent.weight_hh_l0"]) == reasons.VMAP_OUTPUTS
    model(x).square().mean().backward()
    gradient = model.table.weight.grad
    assert gradient is not None
    assert found["table.weight"].side == "right"
    torch.testing.assert_close(found["table.weight"].matrix, gradient.mT @ gradient)


def test_gfim_is_still_a_dict_of_pairs() -> None:
    found = ngplus.gfim(conv_net(), loss_fn, *data(2, 4, 4))
    assert isinstance(found, dict)
    side, matrix = found["0.weight"]
    assert side == "left"
    assert matrix.shape == (4, 4)
    assert set(found.sources.values()) == {"sample"}
    assert found.notes == {}
