"""Compiled models: forward calls whose curvature is captured run eagerly, all others run compiled.

torch.compile traces hooks together with the model. While no refresh is due the hooks add nothing to the graph, and the
model compiles as it does without NG+. While a refresh is due:

======================== ==============================================================================================
``torch.compile(model)`` its calls run eagerly, whether it is made before the optimizer or after
``model.compile()``      the same, from the moment the optimizer has seen it: at construction, ``zero_grad``, ``step``
a compiled function      the graph breaks at each hook; with fullgraph=True this is an error that says what to do
======================== ==============================================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

REASON = (
    "NGPlus captures curvature in this call, which must run eagerly. Pass it the compiled model, "
    "NGPlus(torch.compile(model)): it then runs such calls eagerly, and all others as one graph. Or leave out "
    "fullgraph=True"
)


def uncompiled() -> Callable[..., Any]:
    """Returns a function from ``f, *args`` to ``f(*args)`` that runs outside of any graph."""

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    try:
        return torch.compiler.disable(call, reason=REASON)
    except TypeError:  # torch before 2.8 takes no reason
        return torch.compiler.disable(call)


class _EagerCalls:
    """Makes the calls of one compiled module eager where ``listener.expects()`` says that they are to be captured."""

    def __init__(self, listener: weakref.ref[Any]) -> None:
        self._listener = listener
        self._stances: list[Any] = []

    def enter(self) -> None:
        listener = self._listener()
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
    """Replaces the compiled call that ``Module.compile`` has set."""

    def __init__(self, module: nn.Module, listener: weakref.ref[Any]) -> None:
        self._module, self._listener, self._eager_calls = weakref.ref(module), listener, _EagerCalls(listener)
        self._call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        self._eager_calls.enter()
        try:
            return self._call(*args, **kwargs)
        finally:
            self._eager_calls.leave()

    def listens_for(self, listener: weakref.ref[Any]) -> bool:
        inner = isinstance(self._call, _CompiledCall) and self._call.listens_for(listener)
        return self._listener is listener or inner

    def remove(self) -> None:
        module = self._module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._call


class CompiledCalls:
    """Finds the compiled modules that call a watched module, and makes their calls eager where the listener expects it.

    ``hook`` wraps a hook so that it does nothing in copies of the model. ``handles`` gets what has to be removed later.
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

        # torch.compile(model) returns a module that registers the model as "_orig_mod".
        handles.append(register_module_module_registration_hook(registered))

    def _concerns(self, module: nn.Module) -> bool:
        return any(part in self._watched for part in module.modules())

    def add_wrapper(self, compiled: nn.Module) -> None:
        """For what ``torch.compile(module)`` returns."""
        eager_calls = _EagerCalls(self._listener)

        def before(module: nn.Module, args: Any) -> None:
            eager_calls.leave()  # left over from a call that Ctrl-C has ended, after which no hook runs
            eager_calls.enter()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            eager_calls.leave()

        self._handles += [
            compiled.register_forward_pre_hook(self._hook(before)),
            compiled.register_forward_hook(self._hook(after), always_call=True),
        ]

    def add_compiled_in_place(self, model: nn.Module) -> None:
        """For modules on which ``compile()`` has been called since the last call of this method."""
        for module in model.modules():
            call = module._compiled_call_impl
            if call is None or (isinstance(call, _CompiledCall) and call.listens_for(self._listener)):
                continue
            if self._concerns(module):
                self._handles.append(_CompiledCall(module, self._listener))
