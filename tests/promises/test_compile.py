"""torch.compile of the model and of the step."""

from __future__ import annotations

import copy

import pytest
import torch
from steps import (
    EXACT,
    assert_equal,
    data,
    several_steps,
)
from torch import nn

import ngplus

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    ("given", "fullgraph"), [("model", False), ("compiled model", False), ("compiled model", True)]
)
def test_compiled_model(given: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    plain = copy.deepcopy(model)
    x, y = data(4)
    options = {**EXACT, "update_every": 2}
    optimizer = ngplus.NGPlus(model if given == "model" else compiled, **options)
    several_steps(compiled, optimizer, x, y)
    before = copy.deepcopy(plain)
    several_steps(plain, ngplus.NGPlus(plain, **options), x, y)
    assert_equal(model, before, dict(plain.named_parameters()))
