"""Compiled models: a call that a refresh has to see runs eagerly, every other call runs compiled.

torch.compile traces hooks together with the model. While no refresh is due the hooks leave nothing in the graph, so a
model that compiles as one graph does so with NG+, too. While one is due:

======================== ==============================================================================================
``torch.compile(model)`` its calls run eagerly, whether it is made before the optimizer or after
``model.compile()``      the same, from the moment the optimizer has seen it: at construction, ``zero_grad``, ``step``
a compiled function      the graph breaks at each hook; with fullgraph=True this is an error that says what to do
======================== ==============================================================================================
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

REASON = (
    "NG+ gathers curvature in this call, which needs the model's own tensors. Compile the model before the optimizer "
    "is made and give NGPlus the compiled one, NGPlus(torch.compile(model)): such calls then run eagerly, and all "
    "others as one graph. Or leave fullgraph=True out"
)


class Listener(Protocol):
    """What this room knows of a capture."""

    def expects(self) -> bool:
        """Before a call from outside of any graph: is it one that a refresh has to see?"""


@functools.cache
def uncompiled() -> Callable[..., Any]:
    """``f, *args -> f(*args)``, out of any graph."""

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    try:
        return torch.compiler.disable(call, reason=REASON)
    except TypeError:  # torch before 2.8 takes no reason
        return torch.compiler.disable(call)


class _Eagerly:
    """Around calls of one compiled module: eager where the listener expects them."""

    def __init__(self, listener: weakref.ref[Any]) -> None:
        self._listener = listener
        self._stances: list[Any] = []

    def enter(self) -> None:
        listener: Listener | None = self._listener()
        stance = None
        if listener is not None and listener.expects():
            try:
                stance = torch.compiler.set_stance("force_eager")
            except RuntimeError:  # called by a compiled function, whose graph breaks at the hooks
                stance = None
        self._stances.append(stance)

    def leave(self) -> None:
        stance = self._stances.pop() if self._stances else None
        if stance is not None:
            stance.__exit__(None, None, None)


class _CompiledCall:
    """In the place of what ``Module.compile`` has made of a module's call."""

    def __init__(self, module: nn.Module, listener: weakref.ref[Any]) -> None:
        self._module, self._listener, self._eagerly = weakref.ref(module), listener, _Eagerly(listener)
        self._call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        self._eagerly.enter()
        try:
            return self._call(*args, **kwargs)
        finally:
            self._eagerly.leave()

    def listens_for(self, listener: weakref.ref[Any]) -> bool:
        inner = isinstance(self._call, _CompiledCall) and self._call.listens_for(listener)
        return self._listener is listener or inner

    def remove(self) -> None:
        module = self._module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._call


class CompiledCalls:
    """Finds the compiled modules that call a watched one, and makes their calls eager where the listener expects it.

    ``hook`` wraps a hook so that it is inert in copies. What is put on modules goes into ``handles``.
    """

    def __init__(
        self,
        watched: Iterable[nn.Module],
        listener: weakref.ref[Any],
        hook: Callable[[Callable[..., Any]], Callable[..., Any]],
        handles: list[Any],
    ) -> None:
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet(watched)
        self._listener, self._hook, self._handles = listener, hook, handles
        this = weakref.ref(self)

        def registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
            calls = this()
            if name == "_orig_mod" and module is not None and calls is not None and calls._concerns(module):
                calls.add_wrapper(owner)

        # torch.compile(model) makes a module whose child, of this name, is the model.
        handles.append(register_module_module_registration_hook(registered))

    def _concerns(self, module: nn.Module) -> bool:
        return any(part in self._watched for part in module.modules())

    def add_wrapper(self, compiled: nn.Module) -> None:
        """For what ``torch.compile(module)`` returns."""
        eagerly = _Eagerly(self._listener)

        def before(module: nn.Module, args: Any) -> None:
            eagerly.leave()  # what a call has left that was broken off by Ctrl-C, when no hook runs
            eagerly.enter()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            eagerly.leave()

        self._handles += [
            compiled.register_forward_pre_hook(self._hook(before)),
            compiled.register_forward_hook(self._hook(after), always_call=True),
        ]

    def add_compiled_in_place(self, model: nn.Module) -> None:
        """For modules on which ``compile()`` has been called since the last look."""
        for module in model.modules():
            call = module._compiled_call_impl
            if call is None or (isinstance(call, _CompiledCall) and call.listens_for(self._listener)):
                continue
            if self._concerns(module):
                self._handles.append(_CompiledCall(module, self._listener))
