"""Layers with a forward of their own, or with a weight that is computed from their parameters.

The rule of Linear does not know what the forward of a subclass, such as ``class Scaled(nn.Linear)``, does with its
input, output and weight. On a refresh step :class:`ForwardCalls` sees the torch functions that the
forward calls, and the rule is applied to the call of ``F.linear`` (of ``F.conv2d``, of ``F.embedding``) itself. If its
weight is V = f(W), computed by torch functions as with weight norm or weight standardisation, G_i of W is the
derivative of f times G_i of V.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ngplus.capture import reasons
from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, LayerRule, NotPerSample, autocast_input, has_own_forward
from ngplus.capture.layers.layout import Layout, MatrixSpec, kind_of
from ngplus.capture.layers.parts import by_parts
from ngplus.fisher.factors import Factors, OnDemand, widen
from ngplus.fisher.factors.base import Samples
from ngplus.utils.warnings import no_vmap_warnings

if TYPE_CHECKING:
    from ngplus.capture.layers.hooks import Watcher

OF_THE_WEIGHT = ("weight_g", "weight_v", "weight_orig")  # parameters of torch.nn.utils.weight_norm and its like
PARAMETRIZED = "parametrizations.weight."  # those of torch.nn.utils.parametrize
SCALING = {"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide", "true_divide"}


Functions = Mapping[Callable[..., Any], Sequence[str]]


class WeightRule(LayerRule):
    """The rule of a layer with a weight and perhaps a bias, which it gives to one torch function."""

    #: Those functions, with the names of their arguments, among them "input", "weight" and "bias".
    functions: ClassVar[Functions] = {}
    #: ``factors`` are linear in the first input, if that has floating point.
    linear = True
    #: Autocast converts the arguments of ``functions`` to lower precision.
    product = False

    def options(self, given: Mapping[str, Any]) -> Any:
        """What ``factors`` reads from the module, for a call of one of ``functions`` with these arguments."""
        return None

    def watch(self, module: Any, watcher: Watcher) -> list[Any]:
        if self.functions and (has_own_forward(module) or sources_of(module)):
            return _watch_calls(self, module, watcher)
        handles = super().watch(module, watcher)
        if self.product and not has_own_forward(module):
            hook = watcher.hook(partial(_convert_input, watcher))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return handles


def _convert_input(watcher: Watcher, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Converts the input under autocast, as the layer would, where it is going to be saved."""
    if not args or not watcher.listening(0) or not isinstance(args[0], Tensor):
        return None
    x = autocast_input(args[0])
    return None if x is args[0] else ((x, *args[1:]), kwargs)


def sources_of(module: nn.Module) -> list[str]:
    """Returns the names of the parameters that ``weight`` is computed from; none if it is a parameter."""
    if "weight" in module._parameters:
        return []
    return [name for name, _ in module.named_parameters() if name in OF_THE_WEIGHT or name.startswith(PARAMETRIZED)]


def with_sources(module: nn.Module, spec: MatrixSpec) -> list[MatrixSpec]:
    """Returns the matrix of weight and bias, and one for each parameter that the weight is computed from."""
    shapes = {name: module.get_parameter(name).shape for name in sources_of(module)}
    weight = max(shapes.values(), key=lambda shape: shape.numel(), default=None)
    kinds = {name: spec.kinds[0] if shape == weight else kind_of(shape) for name, shape in shapes.items()}
    return [spec, *(MatrixSpec((name,), (kind,), spec.groups) for name, kind in kinds.items())]


def _watch_calls(rule: WeightRule, module: nn.Module, watcher: Watcher) -> list[Any]:
    """Registers hooks that record the call of one of ``rule.functions`` in the module's forward."""
    active: dict[int, list[ForwardCalls | None]] = {}  # of each thread
    count = len(rule.matrices(module))

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls = None
        recording = [watcher.recording(i) for i in range(count)]  # each of them counts its use
        if any(recording):
            calls = ForwardCalls(rule, module, watcher)
            calls.__enter__()  # type: ignore[no-untyped-call]
        active.setdefault(threading.get_ident(), []).append(calls)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = active.get(threading.get_ident())
        calls = stack.pop() if stack else None
        if calls is not None:
            calls.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if not calls.refused and output is not None:  # None after an error
                calls.conclude(output)

    return [
        module.register_forward_pre_hook(watcher.hook(before), prepend=True),
        module.register_forward_hook(watcher.hook(after), prepend=True, always_call=True),
    ]


class _Made(NamedTuple):
    """A parameter, by its name, or a tensor of the result of a step, by their numbers."""

    by: str | int
    leaf: int = 0


class _Step(NamedTuple):
    """A call of a torch function, with a :class:`_Made` in the place of each tensor that depends on parameters."""

    function: Callable[..., Any]
    leaves: list[Any]
    tree: Any


class ForwardCalls(TorchFunctionMode):
    """Sees the functions that one forward of a module calls, and how they use its parameters."""

    def __init__(self, rule: WeightRule, module: nn.Module, watcher: Watcher) -> None:
        super().__init__()
        self._rule, self._module, self._watcher = rule, module, watcher
        self._specs = rule.matrices(module)
        self._steps: list[_Step] = []
        self._made: dict[int, tuple[_Made, Tensor]] = {}  # by id; with the tensor, so that its id stays in use
        self._recorded = self.refused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._rule.product and func in self._rule.functions and args and isinstance(args[0], Tensor):
            args = (autocast_input(args[0]), *args[1:])
        out = func(*args, **kwargs)
        if not torch.is_grad_enabled() or self.refused:
            return out
        names = {id(p): name for name, p in self._module.named_parameters()}
        leaves, tree = pytree.tree_flatten((args, kwargs))
        origins = [self._origin(x, names) for x in leaves]
        if not any(origins):
            return out
        if func in self._rule.functions:
            given = dict(zip(self._rule.functions[func], args, strict=False)) | kwargs
            return self._call(given, {name: self._origin(x, names) for name, x in given.items()}, out)
        if _is_in_place(str(getattr(func, "__name__", ""))) or kwargs.get("out") is not None:
            self.refuse(reasons.COMPUTED_IN_PLACE)
        results = [(i, x) for i, x in enumerate(pytree.tree_leaves(out)) if isinstance(x, Tensor) and x.requires_grad]
        if results:
            leaves = [x if made is None else made for x, made in zip(leaves, origins, strict=True)]
            self._steps.append(_Step(func, leaves, tree))
            self._made |= {id(x): (_Made(len(self._steps) - 1, i), x) for i, x in results if id(x) not in names}
        return out

    def _origin(self, x: Any, names: Mapping[int, str]) -> _Made | None:
        if not isinstance(x, Tensor):
            return None
        return _Made(names[id(x)]) if id(x) in names else self._made.get(id(x), (None,))[0]

    def _call(self, given: dict[str, Any], origins: dict[str, _Made | None], output: Tensor) -> Any:
        """Records a call of the rule's function with these arguments, some of which depend on parameters."""
        own, weight, bias = self._specs[0].names, origins["weight"], origins.get("bias")
        if weight is None:
            self.refuse(reasons.NOT_BY_FUNCTIONS)
            return output
        others = sum(made is not None for made in origins.values()) - 1 - (bias is not None and bias.by in own[1:])
        if self._recorded or others:
            self.refuse(reasons.SEVERAL_FUNCTIONS)
            return output
        self._recorded = True
        path = None if weight.by == own[0] else _Path(self._steps, weight)
        if path is not None and any(map(self._watcher.depends_on_inputs, path.constants)):
            self.refuse(reasons.COMPUTED_FROM_OTHERS)
            return output
        inputs = (given["input"], None if path is None else given["weight"])
        result: Any = output
        for i in range(len(self._specs)):
            if self._watcher.recording(i):
                build = _Build(self._rule, self._module, given, path, i, bias is not None)
                adapted = self._watcher.record_call(i, self._module, inputs, output, build)
                result = result if adapted is None else adapted
        return result

    def conclude(self, output: Any) -> None:
        """Refuses what is not certain, at the end of the forward."""
        if not self._recorded:
            names = " or ".join(dict.fromkeys(function.__name__ for function in self._rule.functions))
            self.refuse(reasons.with_detail(reasons.OWN_FORWARD, f"it does not give its weight to {names}"))
        elif any(id(x) in self._made for x in pytree.tree_leaves(output)):
            self.refuse(reasons.SEVERAL_FUNCTIONS)

    def refuse(self, reason: str) -> None:
        """Makes all matrices of the module use mini-batch curvature; the first reason stays."""
        self.refused = True
        for i in range(len(self._specs)):
            if self._watcher.recording(i):
                self._watcher.refuse(i, reason)


def _is_in_place(name: str) -> bool:
    """Returns True for the name of a torch function that changes its first argument, such as ``mul_``, ``__imul__``."""
    if name.startswith("__i"):
        return name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class _Path:
    """How a weight V is computed from parameters: the steps that lead to it."""

    def __init__(self, steps: Sequence[_Step], target: _Made) -> None:
        self._target = target
        self._steps: dict[int, _Step] = {}
        self.names: set[str] = set()
        open_ends = [target]
        while open_ends:
            by = open_ends.pop().by
            if isinstance(by, str):
                self.names.add(by)
            elif by not in self._steps:
                self._steps[by] = steps[by]
                open_ends += [x for x in steps[by].leaves if isinstance(x, _Made)]
        self.constants = [x for step in self._steps.values() for x in step.leaves if isinstance(x, Tensor)]
        self._versions = [x._version for x in self.constants]

    def check(self) -> None:
        """Raises NotPerSample if V is not a function of parameters and constants alone."""
        if [x._version for x in self.constants] != self._versions:
            raise NotPerSample(reasons.COMPUTED_IN_PLACE)
        if any(x.requires_grad and not x.is_leaf for x in self.constants):
            raise NotPerSample(reasons.COMPUTED_FROM_OTHERS)

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Computes V."""
        results: dict[int, list[Any]] = {}

        def value(x: Any) -> Any:
            if not isinstance(x, _Made):
                return x.detach() if isinstance(x, Tensor) else x
            return params[x.by] if isinstance(x.by, str) else results[x.by][x.leaf]

        for number in sorted(self._steps):
            step = self._steps[number]
            args, kwargs = pytree.tree_unflatten([value(x) for x in step.leaves], step.tree)
            results[number] = pytree.tree_leaves(step.function(*args, **kwargs))
        found: Tensor = value(self._target)
        return found

    def factor(self, like: Tensor) -> Tensor | None:
        """Returns c where V = c W with a constant c; else None."""
        for step in self._steps.values():
            first, *others = step.leaves
            made = [isinstance(x, _Made) for x in step.leaves]
            name = getattr(step.function, "__name__", "")
            numbers = all(
                isinstance(x, _Made | int | float) or (isinstance(x, Tensor) and x.numel() == 1) for x in step.leaves
            )
            if name not in SCALING or sum(made) != 1 or len(others) != 1 or not numbers:
                return None
            if "div" in name and not isinstance(first, _Made):
                return None
        return self({name: like.new_ones(()) for name in self.names}).reshape(())


class _Build:
    """Builds the factors of one matrix of the module, from the call of the rule's function."""

    def __init__(
        self, rule: WeightRule, module: nn.Module, given: dict[str, Any], path: _Path | None, matrix: int, bias: bool
    ) -> None:
        self._rule, self._module, self._path, self._matrix, self._bias = rule, module, path, matrix, bias
        self._options, self._computed = rule.options(given), bool(sources_of(module))

    def __call__(self, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        x, weight = inputs
        spec = self._rule.matrices(self._module)[self._matrix]
        with_bias = len(active) > 1 and active[1]
        if self._path is None or (self._computed and self._matrix == 0):
            return self._of_weight(x, grad, (active[0], with_bias), batch)
        name = spec.names[0]
        self._path.check()
        if name not in self._path.names:
            raise NotPerSample(reasons.COMPUTED_FROM_OTHERS)
        if not active[0]:
            return self._of_weight(x, grad, (False, with_bias), batch)
        assert weight is not None
        of_weight = self._rule.matrices(self._module)[0].kinds[0]
        scale = None if self._computed else self._path.factor(weight)
        linear = x is not None and (self._rule.linear or not x.is_floating_point())
        if scale is not None and x is not None and linear:
            return self._scaled(scale, x, grad, (True, with_bias), batch)
        pull = _pull_back(self._path, self._module, name, weight)
        before = Layout([weight.shape], [of_weight], spec.groups)
        after = Layout([self._module.get_parameter(name).shape], spec.kinds[:1], spec.groups)
        return OnDemand(_PulledBack(self._of_weight(x, grad, (True, with_bias), batch), pull, before, after, with_bias))

    def _scaled(self, scale: Tensor, x: Tensor, grad: Tensor, active: Active, batch: Batch) -> Factors:
        """The factors of W where V = c W."""

        def build(tensors: Sequence[Tensor], batch: Batch) -> Factors:
            x, grad = tensors
            if x.is_floating_point():
                return self._of_weight(scale.to(x) * x, grad, active, batch)
            return self._of_weight(x, scale.to(grad) * grad, active, batch)

        if grad.dim() == 1 or x.dim() == 0:
            return build((x, grad), batch)
        front = batch.first(x, int(x.is_floating_point())), batch.first(grad)
        return by_parts(build, front, batch.in_front, copies=True)

    def _of_weight(self, x: Tensor | None, grad: Tensor, active: Active, batch: Batch) -> Factors:
        """The factors of V and the bias."""
        missing = active[1] and not self._bias  # the function did not get it: its part of G_i is zero
        found = self._rule.factors(self._options, (x,), grad, (active[0], active[1] and not missing), batch)
        return widen(found, range(found.cols), found.cols + 1) if missing else found


def _pull_back(path: _Path, module: nn.Module, name: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the function from a gradient of V to that of the parameter of this name."""
    params = {own: module.get_parameter(own).detach().clone() for own in path.names}
    varied = params.pop(name)
    devices = [weight.device] if weight.is_cuda else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            pair: Any = vjp(lambda own: path({**params, name: own}), varied)
        found, pull = pair
    except Exception as error:  # whatever torch.func does not support
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise NotPerSample(reasons.with_detail(reasons.NO_DERIVATIVE, line)) from error
    if found.shape != weight.shape or bool((found - weight).norm() > 1e-3 * weight.norm()):
        raise NotPerSample(reasons.RANDOM_WEIGHT)
    return lambda grad: pull(grad.to(found.dtype))[0]


class _PulledBack:
    """G_i of a parameter W, from those of a weight V = f(W) by the derivative of f. ``bias``: the last column of both
    is the bias, on which f does not depend."""

    def __init__(
        self, inner: Factors, pull: Callable[[Tensor], Tensor], before: Layout, after: Layout, bias: bool
    ) -> None:
        self._inner, self._pull, self._before, self._after, self._bias = inner, pull, before, after, bias
        self.shape = (after.groups, inner.samples, after.rows, after.cols + bias)
        self.half_precision, self.tensors = inner.half_precision, inner.tensors
        of_inner = inner.memory("left", "explicit", inner.cols)
        self.entries = of_inner + 2 * inner.groups * inner.rows * inner.cols

    def take(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return self._apply(self._inner.gradients(samples, dtype))

    def total(self, dtype: torch.dtype) -> Tensor:
        return self._apply(self._inner.gradient_sum(dtype)[:, None])[:, 0]

    def _apply(self, grads: Tensor) -> Tensor:
        def one(grad: Tensor) -> Tensor:
            return self._after.join([self._pull(self._before.split(grad)[0])])

        of_weight = grads[..., : self._before.cols]
        try:
            with no_vmap_warnings():
                found = vmap(one, in_dims=1, out_dims=1)(of_weight)
        except RuntimeError:  # a function whose derivative vmap does not support
            found = torch.stack([one(grad) for grad in of_weight.unbind(1)], dim=1)
        return torch.cat((found, grads[..., self._before.cols :]), dim=-1) if self._bias else found
