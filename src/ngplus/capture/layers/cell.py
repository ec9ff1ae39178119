"""The rule of nn.GRUCell and nn.RNNCell, which are called step by step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, has_own_forward, register_layer
from ngplus.capture.layers.hooks import Watcher
from ngplus.capture.layers.linear import linear_parts
from ngplus.capture.layers.vmap import UnknownModuleRule
from ngplus.fisher.factors import Factors

INPUT, STATE = 0, 1  # the matrices of a cell, and the arguments that they multiply


@register_layer(nn.GRUCell, nn.RNNCell)
class CellRule(UnknownModuleRule):
    """[weight_ih bias_ih] and [weight_hh bias_hh], by the gradients of the two products before the nonlinearities. A
    subclass with its own forward, or computed weights, has per-sample gradients by vmap.

    Examples:
        >>> [row.shape for row in ngplus.NGPlus(nn.GRUCell(3, 2)).plan()]
        [(6, 4), (6, 3)]
    """

    def watch(self, module: Any, watcher: Watcher) -> list[Any]:
        if has_own_forward(module) or not {"weight_ih", "weight_hh"} <= module._parameters.keys():
            return super().watch(module, watcher)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
            given = dict(zip(("input", "hx"), args, strict=False)) | dict(kwargs)
            for matrix in (INPUT, STATE):
                if watcher.recording(matrix):
                    build = partial(_factors, module, matrix)
                    watcher.record(matrix, output, (given["input"], given.get("hx")), build)
                else:
                    watcher.note_samples(matrix, output)

        return [module.register_forward_hook(watcher.hook(after), with_kwargs=True, prepend=True)]


def _factors(module: Any, matrix: int, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
    x, state = (None if given is None else given.to(grad.dtype) for given in inputs)  # as autocast converts them
    assert x is not None
    state = grad.new_zeros(grad.shape) if state is None else state
    of_input = _product(x, module.weight_ih, module.bias_ih)
    of_state = _product(state, module.weight_hh, module.bias_hh)
    if isinstance(module, nn.GRUCell):
        grad = _of_gates(of_input, of_state, state, grad)[matrix]
    elif module.nonlinearity == "tanh":
        grad = grad * (1 - (of_input + of_state).tanh().square())
    else:
        grad = grad * (of_input + of_state > 0)
    return linear_parts((x, state)[matrix], grad, active, batch)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x), None if bias is None else bias.to(x))


def _of_gates(of_input: Tensor, of_state: Tensor, state: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of W_ih x + b_ih and W_hh h + b_hh, from that of h' = n + z (h - n)."""
    (reset, update, new), (own_reset, own_update, own_new) = of_input.chunk(3, -1), of_state.chunk(3, -1)
    reset, update = (reset + own_reset).sigmoid(), (update + own_update).sigmoid()
    new = (new + reset * own_new).tanh()
    of_new = grad * (1 - update) * (1 - new.square())
    of_update = grad * (state - new) * update * (1 - update)
    of_reset = of_new * own_new * reset * (1 - reset)
    return torch.cat((of_reset, of_update, of_new), -1), torch.cat((of_reset, of_update, of_new * reset), -1)
