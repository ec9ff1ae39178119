"""An architecture with a batch of inputs, and the same samples one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

N = 5  # samples; no other dimension of a model should have this size
LENGTH, WORDS = 7, 23


@dataclass
class Case:
    """A model in train() mode without dropout, in float64.

    Attributes:
        batch: the keyword arguments of the call with all samples; a key that begins with "_" is a positional argument.
        ones: those of the calls with one sample each.
        outputs: selects the tensors [samples, ...] of which the loss is made.
        options: of NGPlus, such as ``sample_index``.
    """

    model: nn.Module
    batch: Mapping[str, Any]
    ones: Sequence[Mapping[str, Any]]
    outputs: Callable[[Any], Sequence[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """What the table has in a row. ``mixes`` says why there is no brute force with one sample at a time."""

    name: str
    library: str
    build: Callable[[], Case]
    mixes: str = ""


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(name: str, library: str, mixes: str = "") -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Registers a function that builds a case."""

    def register(build: Callable[[], Case]) -> Callable[[], Case]:
        assert name not in ARCHITECTURES
        ARCHITECTURES[name] = Architecture(name, library, build, mixes)
        return build

    return register


def batched(model: nn.Module, inputs: Mapping[str, Any], *outputs: str, **options: Any) -> Case:
    """A case whose tensors all have the samples first. ``outputs`` are attributes of what the model returns."""

    def one(i: int) -> dict[str, Any]:
        return {k: x[i : i + 1] if isinstance(x, Tensor) else x for k, x in inputs.items()}

    def select(out: Any) -> list[Tensor]:
        return [getattr(out, name) for name in outputs] if outputs else [out]

    return Case(prepared(model), inputs, [one(i) for i in range(N)], select, options)


def prepared(model: nn.Module) -> nn.Module:
    """In float64 and train() mode, with batch norms in eval() mode, since they would mix the samples. Noise on
    the parameters, as of training, leaves no gradient near zero."""
    model = model.double().train()
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) * 0.1)
    return model


def tokens(length: int = LENGTH, words: int = WORDS, first: int = 3) -> Tensor:
    """Random tokens; the small numbers often are those of special tokens."""
    return torch.randint(first, words, (N, length), generator=torch.Generator().manual_seed(1))


def normal(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
