"""What a layer rule is, and the registry that finds the rule of a module.

A rule answers two questions about a type of layer: which matrices do its parameters form, and how do its inputs and the
gradient of its output become the factors of per-sample gradients. Everything after that knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.samples import Batch
from ngplus.fisher.factors import Factors

Inputs = tuple[Tensor | None, ...]  # the tensors of a call that a rule needs; those that are not given are None
Active = tuple[bool, ...]  # for each name of a matrix's spec: is that parameter trained?


class NotPerSample(Exception):
    """Raised by a rule for a call whose per-sample gradients it cannot give; mini-batch curvature takes their place.

    Examples:
        >>> class Picky(ngplus.layers.LinearRule):
        ...     def factors(self, module, inputs, grad, active, batch):
        ...         if grad.dim() > 2:
        ...             raise ngplus.layers.NotPerSample("sequences are not supported")
        ...         return super().factors(module, inputs, grad, active, batch)
    """


class LayerRule:
    """The base of all rules. A rule for a layer with one matrix overrides ``matrices`` and ``factors``.

    Examples:
        A rule for a layer y = 2 x M:

        >>> class Doubled(nn.Module):
        ...     def __init__(self, inputs, outputs):
        ...         super().__init__()
        ...         self.matrix = nn.Parameter(torch.randn(inputs, outputs))
        ...     def forward(self, x):
        ...         return 2 * x @ self.matrix
        >>> @ngplus.register_layer(Doubled)
        ... class DoubledRule(ngplus.layers.LayerRule):
        ...     def matrices(self, module):
        ...         return [ngplus.layers.MatrixSpec(("matrix",), ("transposed",))]
        ...     def factors(self, module, inputs, grad, active, batch):
        ...         return ngplus.layers.linear_factors(2 * inputs[0], grad, active, batch)
        >>> ngplus.NGPlus(Doubled(3, 2)).plan()["matrix"].source
        'sample'
    """

    #: Does the rule speak for the parameters of the module's children, too?
    claims_children = False
    #: Are the rows of its matrix items that are looked up, as those of an embedding?
    looks_up = False
    #: Are the inputs needed where only the second parameter, the bias, is trained?
    bias_needs_input = True

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        """The matrices that the module's parameters form; parameters that are None are left out by the caller."""
        raise NotImplementedError

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """The tensors that ``factors`` will need, of those that the module was called with."""
        return (args[0] if args else next(iter(kwargs.values()), None),)

    def adapt(self, module: nn.Module, inputs: Inputs, output: Any, batch: Batch) -> Any:
        """May replace the module's output on a refresh step, to give it a batch dimension; as a rule it does not."""
        return output

    def kept(self, module: nn.Module, inputs: Inputs, output: Tensor) -> Inputs:
        """The inputs, and whatever of the module's own work ``factors`` need not do again."""
        return inputs

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        """The factors of G_i from the saved inputs and the gradient of the output.

        ``active`` says for each name of the matrix's spec whether that parameter takes part.
        """
        raise NotImplementedError

    def watch(self, module: nn.Module, watcher: Watcher) -> list[Any]:
        """Registers the hooks that hand inputs and output gradients over; returns their handles."""
        # Before the user's own hooks: these may change the output.
        return [module.register_forward_hook(watcher.forward_hook(0), with_kwargs=True, prepend=True)]


class Watcher:
    """What capture gives to a rule's ``watch``: whether to record now, and where to put it.

    Examples:
        A rule for a module whose output is a tuple, its first element the result:

        >>> class FirstOutput(ngplus.layers.LinearRule):
        ...     def watch(self, module, watcher):
        ...         def build(inputs, grad, active, batch):
        ...             return self.factors(module, inputs, grad, active, batch)
        ...         def look(module, args, output):
        ...             if watcher.recording(0):
        ...                 watcher.record(0, output[0], (args[0],), build)
        ...         return [module.register_forward_hook(watcher.hook(look))]
    """

    def forward_hook(self, matrix: int) -> Callable[..., Any]:
        """The usual forward hook for the module's matrix of that number."""
        raise NotImplementedError

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that does nothing in a copy of the module."""
        raise NotImplementedError

    def recording(self, matrix: int) -> bool:
        """Is this call one that a refresh needs?"""
        raise NotImplementedError

    def refuse(self, matrix: int, reason: str) -> None:
        """Leaves the matrix to mini-batch curvature."""
        raise NotImplementedError

    def record(
        self,
        matrix: int,
        output: Tensor,
        inputs: Inputs,
        build: Callable[[Inputs, Tensor, Active, Batch], Factors],
    ) -> None:
        """When the gradient of ``output`` arrives, ``build(inputs, gradient, active, batch)`` makes the factors."""
        raise NotImplementedError


_RULES: dict[type[nn.Module] | str, LayerRule] = {}

R = TypeVar("R", bound=type[LayerRule])


def register_layer(*types: type[nn.Module] | str) -> Callable[[R], R]:
    """Registers a ``LayerRule`` for module types, given as classes or, for optional libraries, by dotted name.

    A rule serves subclasses, too, and the nearest class wins. Registering again replaces the rule.

    Examples:
        >>> class Mixing(nn.Linear):
        ...     pass
        >>> @ngplus.register_layer(Mixing, "package.module.Mixing")
        ... class MixingRule(ngplus.layers.LinearRule):
        ...     pass
        >>> type(ngplus.layers.rule_for(Mixing(3, 2))).__name__
        'MixingRule'
    """

    def register(rule: R) -> R:
        instance = rule()
        for kind in types:
            _RULES[kind] = instance
        return rule

    return register


def rule_for(module: nn.Module) -> LayerRule | None:
    """The rule of the nearest registered class that the module is an instance of.

    Examples:
        >>> type(ngplus.layers.rule_for(nn.Linear(3, 2))).__name__
        'LinearRule'
        >>> ngplus.layers.rule_for(nn.LSTM(3, 2)) is None
        True
    """
    for cls in type(module).__mro__:
        if cls in _RULES:
            return _RULES[cls]
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in _RULES:
            return _RULES[name]
    return None


def has_own_forward(module: nn.Module) -> bool:
    """Is it a subclass of the class that a rule was written for, with a forward of its own, or was it given one?"""
    for cls in type(module).__mro__:
        if cls in _RULES or f"{cls.__module__}.{cls.__qualname__}" in _RULES:
            names = ("forward", "_conv_forward")
            return any(
                n in module.__dict__ or getattr(type(module), n, None) is not getattr(cls, n, None) for n in names
            )
    return False


def is_made_by(node: str, output: Tensor, x: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    """Was the output made by this function of torch's, of just this input and these parameters?"""
    made = output.grad_fn
    if made is None or made.name() != node:
        return False
    source = torch.autograd.graph.get_gradient_edge(x).node if x.requires_grad else None
    wanted = [None if p is None or not p.requires_grad else p for p in parameters]
    found = [getattr(edge, "variable", None) for edge, _ in made.next_functions[1:]]
    return made.next_functions[0][0] is source and all(f is w for f, w in zip(found, wanted, strict=True))


def no_mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """Curvature is worked out in the precision of its tensors, whatever the forward pass is cast to."""
    if not torch.is_autocast_enabled(device.type):  # as most often: entering and leaving costs as much as a small layer
        return nullcontext()
    return torch.autocast(device_type=device.type, enabled=False)
