"""What torch's autograd is computing: the pass in progress, and its results."""

from __future__ import annotations

import torch
from torch import Tensor

from ngplus.capture.matrices import ParameterMatrix


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def in_functional_call() -> bool:
    """Returns True for a call by torch.func (the vmap fallback makes such calls) or by a tracer."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()


def is_batched(grad: Tensor) -> bool:
    """Returns True for several gradients at once (``is_grads_batched``, a vectorized Jacobian)."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def reaches_parameters(matrix: ParameterMatrix) -> str:
    """Returns how this backward pass computes gradients of the matrix's parameters: "backward" adds them to .grad,
    "grad" is ``autograd.grad``, which returns them; "" if it does not compute them."""
    managed = [matrix.managed[i]._unsharded_param for i in matrix.parts] if matrix.managed else None
    for param in managed or matrix.active_params:
        with torch.enable_grad():
            view = param.view_as(param).grad_fn  # works without storage as well, as FSDP2 leaves it
        leaf = None if view is None else view.next_functions[0][0]
        try:
            if leaf is None or torch._C._will_engine_execute_node(leaf):
                return "backward"
        except RuntimeError:  # for this parameter itself
            return "grad"
    return ""


def hook_target(output: Tensor) -> Tensor:
    """Returns the tensor whose hook sees the output's gradient, even if the output is changed in place.

    A Linear on N-D input returns a view. An in-place activation on a view removes the view's own node from the graph;
    the gradient then reaches the base, which has the same entries.
    """
    base = output._base
    if base is None or base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
        return output
    return base if base.requires_grad else output
