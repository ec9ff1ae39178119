"""The GPT of the workload shakespeare, and what its presets ask of the training loop: clipping and weight decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ngplus.lab import loop, settings
from ngplus.lab.optimizers import get
from ngplus.lab.workloads import Task
from ngplus.lab.workloads.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread")


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=11, context=6, width=16, heads=2, depth=2)


def test_gpt_does_not_see_later_tokens() -> None:
    model, tokens = small_gpt(), torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 9
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:4].max() == 0
    assert difference[4:].min() > 0


def test_gpt_has_the_size_of_nanogpt() -> None:
    model = GPT(vocabulary=65, context=64, width=128, heads=4, depth=4, bias=False)
    assert model.head.weight is model.tokens.weight
    # nanoGPT prints 0.80M for these settings: its count leaves out the positions
    assert sum(p.numel() for p in model.parameters()) - model.positions.weight.numel() == 795_904


def test_gpt_scales_the_residual_layers_down() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=65, context=64, width=128, heads=4, depth=8)
    assert model.blocks[0].up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


class Steep(Task):
    """A loss with a gradient of 30 for each of two parameters."""

    max_grad_norm = 0.5

    def model(self) -> nn.Module:
        return nn.Linear(2, 1, bias=False)

    def batch(self, seed: int, step: int) -> torch.Tensor:
        return torch.full((1, 2), 30.0)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}


def test_gradients_are_clipped_to_the_norm_of_the_task() -> None:
    task = Steep()
    model = task.model()
    before = model.weight.detach().clone()
    loop._train_step(task, model, torch.optim.SGD(model.parameters(), lr=1.0), task.batch(0, 0))
    assert float((model.weight.detach() - before).norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "ngplus"])
def test_a_preset_gives_every_optimizer_the_same_decay(optimizer: str) -> None:
    workload, size = settings.open_preset("shakespeare", "standard", {}, [], optimizer)
    for rate in (0.002, 0.01):
        hyper = settings.configure(workload, "standard", size, optimizer, seed=0, lr=rate).hyper
        assert hyper["weight_decay"] * rate == pytest.approx(1e-4)
    own = settings.configure(workload, "standard", size, optimizer, seed=0, sets=["weight_decay=0.3"]).hyper
    assert own["weight_decay"] == 0.3


def test_a_tuned_weight_decay_comes_before_the_decay_of_the_preset() -> None:
    workload, size = settings.open_preset("shakespeare", "standard", {}, [], "splus")
    tried = settings.configure(workload, "standard", size, "splus", seed=0, hyper={"lr": 0.2, "weight_decay": 0.3})
    assert tried.hyper["weight_decay"] == 0.3


def test_without_a_decay_optimizers_keep_their_own() -> None:
    workload, size = settings.open_preset("shakespeare", "small", {}, [], "adamw")
    hyper = settings.configure(workload, "small", size, "adamw", seed=0).hyper
    assert hyper["weight_decay"] == get("adamw").defaults["weight_decay"]
