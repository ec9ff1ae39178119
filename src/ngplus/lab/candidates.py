"""Candidates for the update of NGAdam: plain optimizers that were compared before one was chosen (docs/decision.md).

With moving averages L of G G^T and R of G^T G, and the momentum M, the direction of a matrix is

    D = sqrt(tr L) (L + lambda I)^(-1/2) M (R + lambda I)^(-1/2)

``ngplus.reference.ngadam_direction`` is that update without blocks. :class:`Roots` is the optimizer. It cuts long sides
into blocks, takes Adam for vectors, and Adafactor's factored second moment, which is the same formula with diagonal L
and R, for tables. With other exponents p and q, and l and r the mean eigenvalues of L and R, the direction is

    D = sqrt(m n / tr L) (L / l + lambda I)^(-p) M (R / r + lambda I)^(-q)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ngplus.reference import is_refresh

State = dict[str, Any]


# ------------------------------------------------------------------------------------------------ blocks


def block_size(length: int, other: int, unit: int = 1, longest: int = 128) -> int:
    """Rows of a block of a side: all up to 160, else equal blocks of 128 (``longest``) or fewer; 1, a diagonal matrix,
    for a side longer than 640 and than five times the other one. Blocks of a convolution hold whole kernels of ``unit``
    numbers.
    """
    if length <= longest * 5 // 4:
        return length
    if length > 640 and length >= 5 * other:
        return 1
    units = length // unit
    blocks = math.ceil(units / max(1, (longest if unit == 1 else longest * 9 // 8) // unit))
    return unit * math.ceil(units / blocks)


def row_blocks(x: Tensor, rows: int) -> Tensor:
    """[..., m, n] as [..., a, rows, n], with zeros at the end where a block is not full."""
    missing = -x.shape[-2] % rows
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (-1, rows))


def products(gradients: Tensor, rows: int) -> Tensor:
    """The sum over gradients [S, m, n] of G G^T, in diagonal blocks [a, rows, rows]."""
    blocks = row_blocks(gradients, rows).movedim(0, 2).flatten(2)
    return blocks.square().sum(2, keepdim=True) if rows == 1 else blocks @ blocks.mT


def multiply(root: Tensor, x: Tensor) -> Tensor:
    """A block-diagonal matrix in its blocks [a, rows, rows] times x [m, n]."""
    rows = root.shape[-1]
    return root.flatten(1) * x if rows == 1 else (root @ row_blocks(x, rows)).flatten(0, 1)[: len(x)]


# ------------------------------------------------------------------------------------------------ roots


def inverse_power(x: Tensor, damping: float, exponent: float = 0.5) -> Tensor:
    """(x + damping I)^-exponent of each of a batch."""
    if x.shape[-1] == 1:
        return (x + damping).pow(-exponent)
    values, vectors = torch.linalg.eigh(x)
    return (vectors * (values.clamp_min(0) + damping).pow(-exponent).unsqueeze(-2)) @ vectors.mT


def qr_root(x: Tensor, damping: float, basis: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + damping I)^(-1/2) in a basis that follows the eigenvectors of x by one step of orthogonal iteration, as in
    SOAP: the root, the basis for the next step, and which blocks were made by eigh. Those are the blocks in which the
    part off the diagonal, in units of the diagonal, has rows with a root mean square norm above ``bound``.
    """
    basis = torch.linalg.qr(x @ basis).Q
    inside = basis.mT @ x @ basis
    values = inside.diagonal(dim1=-2, dim2=-1).clamp_min(0) + damping
    scale = values.rsqrt()
    off = scale.unsqueeze(-1) * inside * scale.unsqueeze(-2)
    off.diagonal(dim1=-2, dim2=-1).zero_()
    restarted = ~(off.norm(dim=(-2, -1)) <= bound * math.sqrt(x.shape[-1]))
    if restarted.any():
        exact, basis[restarted] = torch.linalg.eigh(x[restarted])
        values[restarted] = exact.clamp_min(0) + damping
    root = (basis * values.rsqrt().unsqueeze(-2)) @ basis.mT
    order = values.argsort(-1, descending=True).unsqueeze(-2)
    return root, basis.gather(-1, order.expand_as(basis)), restarted


def newton_root(x: Tensor, damping: float, root: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + damping I)^(-1/2) by two steps X <- X (3 I - X A X) / 2 from the last root, made symmetric; returns what
    :func:`qr_root` returns. Blocks in which the rows of I - X A X have a root mean square norm above ``bound``, or in
    which X is not positive definite, are made by eigh.
    """
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    for _ in range(2):
        root = root @ (3 * eye - root @ (x + damping * eye) @ root) / 2
        root = (root + root.mT) / 2
    return _checked(root, x, damping, bound)


def coupled_root(x: Tensor, damping: float, root: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`newton_root`, by the coupled iteration Y <- Y S, Z <- S Z with S = a (3 I - a^2 Z Y) / 2, which begins
    with Y = A / norm(A) and Z = I. The singular values of Y are from sqrt(damping / norm(A)) to 1, and a is the best
    number for such an interval (Chen and Chow). It needs no last root.
    """
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    norm = (x + damping * eye).norm(dim=(-2, -1), keepdim=True)
    y, z = (x + damping * eye) / norm, eye.expand_as(x)
    low = math.sqrt(damping / float(norm.max()))
    while low < 0.999:
        a = math.sqrt(min(3 / (1 + low + low * low), 2.9))
        step = a / 2 * (3 * eye - a * a * z @ y)
        y, z = y @ step, step @ z
        low = min(a * v * (3 - (a * v) ** 2) / 2 for v in (low, 1.0))
    return _checked(z / norm.sqrt(), x, damping, bound)


def _checked(root: Tensor, x: Tensor, damping: float, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    residual = (eye - root @ (x + damping * eye) @ root).norm(dim=(-2, -1))
    restarted = ~(residual <= bound * math.sqrt(x.shape[-1])) | (torch.linalg.cholesky_ex(root).info > 0)
    if restarted.any():
        root[restarted] = inverse_power(x[restarted], damping)
    return root, root, restarted


# ------------------------------------------------------------------------------------------------ the optimizer


class Roots(torch.optim.Optimizer):
    """``ngplus.reference.ngadam_direction`` for every matrix of a model, in blocks.

    With ``sample_steps``, the products of the first steps come from per-sample gradients, scaled to the trace of those
    of the mini-batch gradient. With ``lazy``, L and R take in the gradients of the steps in which roots are made, and
    no others. With ``decay``, the damping is at least 1 / t^2 in step t. With ``adam_tables``, tables have Adam's
    update, with ``full_tables`` a diagonal L and an R in blocks.

    ``exponents`` are p and q. ``block`` is the longest block of a long side. With ``tracking`` "qr", "newton"
    or "coupled", roots are made by :func:`qr_root`, :func:`newton_root` or :func:`coupled_root` with the check
    ``bound``; ``restarts`` and ``tracked`` count the blocks that eigh has made, and all.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.005,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        damping: float = 1e-5,
        update_every: int = 5,
        max_rms: float = 0.3,
        sample_steps: int = 0,
        lazy: bool = False,
        decay: bool = False,
        adam_tables: bool = False,
        full_tables: bool = False,
        exponents: tuple[float, float] = (0.5, 0.5),
        block: int = 128,
        tracking: str = "",
        bound: float = 0.5,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        defaults.update(damping=damping, update_every=update_every, max_rms=max_rms, lazy=lazy, decay=decay)
        defaults.update(exponents=exponents, block=block, tracking=tracking, bound=bound)
        super().__init__([p for p in model.parameters() if p.requires_grad], defaults)
        self.tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        self.samples = SampleGradients(model) if sample_steps else None
        self.sample_steps, self.adam_tables, self.full_tables = sample_steps, adam_tables, full_tables
        self.restarts, self.tracked = 0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                adam = param.ndim < 2 or (self.adam_tables and param in self.tables)
                made = adam_direction if adam else self._direction
                direction = made(param, gradient, state, group)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
        if self.samples is not None and all(s["step"] >= self.sample_steps for s in self.state.values()):
            self.samples.remove()

    def _direction(self, param: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        (beta1, beta2), step = group["betas"], state["step"]
        g = gradient.flatten(1)
        m, n = g.shape
        table = param in self.tables
        unit = param[0, 0].numel() if param.ndim > 2 else 1
        rows = 1 if table else block_size(m, n, longest=group["block"])
        cols = 1 if table and not self.full_tables else block_size(n, m, unit, group["block"])
        if "momentum" not in state:
            state.update(momentum=torch.zeros_like(g), averaged=0)
            state["left"] = g.new_zeros(math.ceil(m / rows), rows, rows)
            state["right"] = g.new_zeros(math.ceil(n / cols), cols, cols)
        state["momentum"].lerp_(g, 1 - beta1)
        due = is_refresh(step, group["update_every"])
        if due or not group["lazy"]:
            left, right = products(g[None], rows), products(g.mT[None], cols)
            if self.samples is not None and step <= self.sample_steps:
                own = self.samples.pop(param)
                if own is not None:
                    left, right = _like(products(own, rows), left), _like(products(own.mT, cols), right)
            weight = 1 - beta2 ** (step - state["averaged"])
            state["left"].lerp_(left, weight)
            state["right"].lerp_(right, weight)
            state["averaged"] = step
        if due:
            correction = 1 - beta2**step
            damping = max(group["damping"], step**-2) if group["decay"] else group["damping"]
            trace = (_trace(state["left"]) / correction).clamp_min(torch.finfo(g.dtype).tiny)
            left = self._root(state, "left", state["left"] * (m / correction / trace), damping, group)
            state["left_root"] = left * (math.sqrt(m * n) / trace.sqrt())
            state["right_root"] = self._root(state, "right", state["right"] * (n / correction / trace), damping, group)
        ahead = state["momentum"].lerp(g, 1 - beta1).div_(1 - beta1**step)
        direction = multiply(state["left_root"], multiply(state["right_root"], ahead.mT).mT)
        rms = direction.norm() / math.sqrt(m * n)
        return direction.div_((rms / group["max_rms"]).clamp_min_(1.0)).view_as(param)

    def _root(self, state: State, side: str, x: Tensor, damping: float, group: dict[str, Any]) -> Tensor:
        """The root of a side with the mean eigenvalue 1."""
        exponent = group["exponents"][side == "right"]
        if x.shape[-1] == 1 or not group["tracking"]:
            return inverse_power(x, damping, exponent)
        last = state.get(side + "_last", torch.eye(x.shape[-1], dtype=x.dtype).expand_as(x))
        follow = {"qr": qr_root, "newton": newton_root, "coupled": coupled_root}[group["tracking"]]
        root, state[side + "_last"], restarted = follow(x, damping, last, group["bound"])
        self.restarts, self.tracked = self.restarts + int(restarted.sum()), self.tracked + len(x)
        return root


def adam_direction(param: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> Tensor:
    """Adam's direction with Nesterov's momentum."""
    (beta1, beta2), step = group["betas"], state["step"]
    if "momentum" not in state:
        state.update(momentum=torch.zeros_like(gradient), second=torch.zeros_like(gradient))
    state["momentum"].lerp_(gradient, 1 - beta1)
    state["second"].lerp_(gradient.square(), 1 - beta2)
    ahead = state["momentum"].lerp(gradient, 1 - beta1) / (1 - beta1**step)
    return ahead / ((state["second"] / (1 - beta2**step)).sqrt() + group["eps"])


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum()


def _like(x: Tensor, other: Tensor) -> Tensor:
    """Scaled to the trace of another matrix."""
    return x * (_trace(other) / _trace(x).clamp_min(torch.finfo(x.dtype).tiny))


class SampleGradients:
    """Per-sample gradients of linear and convolution layers that are called once in a pass, by hooks.

    Samples are the first dimension of a layer's input, or what the model's ``sample_index`` says.
    """

    def __init__(self, model: nn.Module) -> None:
        self.index: list[Tensor] = []
        self.found: dict[Tensor, list[Tensor]] = {}
        self.handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._read_index)]
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and getattr(module, "groups", 1) == 1:
                self.handles.append(module.register_forward_hook(self._on_forward))

    def _read_index(self, model: nn.Module, args: Any) -> None:
        own = getattr(model, "sample_index", None)
        self.index = list(own(*args)) if own is not None else []

    def _on_forward(self, module: Any, args: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad:
            inputs = args[0].detach()
            output.register_hook(lambda gradient: self._on_backward(module, inputs, gradient))

    def _on_backward(self, module: Any, inputs: Tensor, gradient: Tensor) -> None:
        with torch.no_grad():
            if isinstance(module, nn.Conv2d):
                geometry: Any = {name: getattr(module, name) for name in ("dilation", "padding", "stride")}
                a = F.unfold(inputs, module.kernel_size, **geometry).mT
                g = gradient.flatten(2).mT
            elif index := [i for i in self.index if len(i) == len(inputs)]:
                count = int(self.index[0].max()) + 1
                each = gradient.unsqueeze(2) * inputs.unsqueeze(1)
                self.found.setdefault(module.weight, []).append(
                    each.new_zeros(count, *each.shape[1:]).index_add(0, index[0], each)
                )
                return
            else:
                a, g = (x.reshape(len(x), -1, x.shape[-1]) for x in (inputs, gradient))
            self.found.setdefault(module.weight, []).append(g.mT @ a)

    def pop(self, param: Tensor) -> Tensor | None:
        """[S, m, n], where the layer was called once."""
        found = self.found.pop(param, [])
        return found[0] if len(found) == 1 else None

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.found.clear()
