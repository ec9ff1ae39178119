"""The contract of a layer rule, and the registry that finds the rule of a module.

To add a rule, subclass :class:`LayerRule`, implement ``matrices`` and ``factors``, and decorate the class with
``ngplus.layers.register_layer``. The rules of this package are in this folder; ``linear.py`` is the shortest.

Tensor convention. A module's parameters form matrices W (m x n). ``factors`` returns the per-sample gradients G_i
(m x n) of one matrix as :class:`~ngplus.fisher.factors.Factors`, most often as ``Outer(left, right)``:

    left   [groups, samples, positions, m]     gradients g_ip of the output
    right  [groups, samples, positions, n]     inputs a_ip, with a last column of ones for the bias (``ones=True``)
    G_i  = sum_p g_ip a_ip^T                   for each group

========================================= ========================= ======================= =======
layer and input                           left                      right                   matrix
========================================= ========================= ======================= =======
Linear(3, 2) on [8, 3]                    [1, 8, 1, 2]              [1, 8, 1, 3 + 1]        2 x 4
Linear(3, 2) on 5 tokens, [8, 5, 3]       [1, 8, 5, 2]              [1, 8, 5, 3 + 1]        2 x 4
Conv2d(4, 6, 3, groups=2) on [8, 4, 7, 7] [2, 8, 25, 3]             [2, 8, 25, 2 * 9 + 1]   3 x 19
========================================= ========================= ======================= =======

Samples that were flattened into the batch dimension become positions: :class:`~ngplus.capture.batch.Batch` reshapes a
tensor to [samples, positions, features]. The left side, L = 1/S sum_i G_i G_i^T, is m x m. The right side, R, is n x n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ngplus.capture.batch import Batch
from ngplus.capture.batch import NotPerSample as NotPerSample
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.fisher.factors import Factors

if TYPE_CHECKING:
    from ngplus.capture.layers.hooks import Watcher

Inputs = tuple[Tensor | None, ...]  # the tensors of a forward call that a rule needs; None for an absent one
Active = tuple[bool, ...]  # for each name of a MatrixSpec: does the parameter require gradients?
Build = Callable[[Inputs, Tensor, Active, Batch], Factors]  # (inputs, gradient of the output, active, batch)


class LayerRule:
    """Base class of all rules. A rule for a layer with one matrix implements ``matrices`` and ``factors``.

    ``module`` is a module of a type that the rule is registered for, or of a subclass.

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

    claims_children = False
    """The rule covers the parameters of the module's children, which get no rule of their own."""
    looks_up = False
    """The rows of the matrix are table entries that are looked up by index, as in an embedding."""
    bias_needs_input = True
    """``factors`` needs the inputs where only the second parameter, the bias, is trained. If False, it gets None."""

    def matrices(self, module: Any) -> list[MatrixSpec]:
        """Returns the matrices that the module's parameters form. Absent parameters, such as a bias, may be named."""
        raise NotImplementedError

    def inputs(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """Selects from the arguments of the forward call the tensors that ``factors`` needs."""
        return (args[0] if args else next(iter(kwargs.values()), None),)

    def adapt(self, module: Any, inputs: Inputs, output: Any, batch: Batch) -> Any:
        """Returns the output, or on a refresh step a replacement with equal values that has a batch dimension."""
        return output

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        """Returns the factors of $G_i$, from the saved inputs and the gradient of the output.

        ``active`` says for each name of the matrix's spec whether that parameter is trained.
        """
        raise NotImplementedError

    def watch(self, module: Any, watcher: Watcher) -> list[Any]:
        """Registers the hooks that record inputs and output gradients, and returns their handles."""
        # Prepended, since hooks of the user may change the output.
        return [module.register_forward_hook(watcher.forward_hook(0), with_kwargs=True, prepend=True)]


_RULES: dict[type[nn.Module] | str, LayerRule] = {}

R = TypeVar("R", bound=type[LayerRule])


def register_layer(*types: type[nn.Module] | str) -> Callable[[R], R]:
    """Registers a ``LayerRule`` for module types, given as classes or, for optional libraries, by dotted name.

    A rule also applies to subclasses; the nearest class wins. Registering a type again replaces its rule.

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
    """Returns the rule of the nearest registered class that the module is an instance of, or None.

    Examples:
        >>> type(ngplus.layers.rule_for(nn.Linear(3, 2))).__name__
        'LinearRule'
        >>> ngplus.layers.rule_for(nn.LSTM(3, 2)) is None
        True
    """
    cls = _registered_class(module)
    return None if cls is None else _RULES[cls if cls in _RULES else _dotted_name(cls)]


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if the module's forward is not that of the class its rule is registered for."""
    cls = _registered_class(module)
    return cls is not None and any(
        name in module.__dict__ or getattr(type(module), name, None) is not getattr(cls, name, None)
        for name in ("forward", "_conv_forward")
    )


def _registered_class(module: nn.Module) -> type[Any] | None:
    return next((cls for cls in type(module).__mro__ if cls in _RULES or _dotted_name(cls) in _RULES), None)


def _dotted_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def autocast_input(x: Tensor) -> Tensor:
    """Returns the input of a product as autocast converts it, so that what is saved of it is saved once."""
    kind = x.device.type
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
