"""Online NG+: the method of the paper's regret analysis, W_{t+1} = Proj(W_t - 1/alpha * L_t^-1 G_t).

The state is P_t, the inverse of L_t = L_{t-1} + G_t G_t^T with L_0 = eps I, which Woodbury's identity updates. A
projection in the norm ||X||_L^2 = trace(X^T L X) is computed in the eigenbasis of P_t, where L is
diagonal; both balls are invariant under that change of basis.

Every projection has a certificate. Z in K is the projection of V if and only if L (V - Z) is in the normal cone of K at
Z. For Z in K and any Y in that cone, the gap between the projection problem and its dual is
1/2 ||Z - V + L^-1 Y||_L^2, and strong convexity bounds the distance by it:

    ||Z - Proj(V)||_L <= ||Z - V + L^-1 Y||_L.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ngplus.fisher.factors import wide
from ngplus.utils.validation import choice

__all__ = ["OnlineNGPlus", "Projection", "project"]

BALLS = ("frobenius", "spectral")
NORMS = ("curvature", "plain")
SIDES = ("left", "right", "auto")
MAX_ITERATIONS, BALANCED = 5000, 2000  # iterations of ADMM, and those in which rho is balanced
RELAXATION = 1.7  # of ADMM: any value in (0, 2) converges


class Projection(NamedTuple):
    """A point of the ball, a bound on its distance to the exact projection in the norm of L, and the iterations used.

    Examples:
        >>> point, bound, iterations = project(torch.eye(2), 2.0, "frobenius")
        >>> bound, iterations  # the point was inside the ball
        (0.0, 0)
    """

    point: Tensor
    bound: float
    iterations: int


class OnlineNGPlus(Optimizer):
    r"""The online form of NG+, with logarithmic regret on exp-concave losses.

    For the gradient $G_t$ of the loss of round $t$ in the parameter matrix $W_t$ $(m \times n)$, and
    $L_0 = \epsilon I$,

    $$L_t = L_{t-1} + G_t G_t^\top$$

    $$W_{t+1} = \operatorname{Proj}_K \left( W_t - \tfrac{1}{\alpha} L_t^{-1} G_t \right)$$

    with $K$ a ball and the projection in the norm of $L_t$. If every loss $\psi$ satisfies on $K$

    $$\psi(X) \ge \psi(Y) + \langle \nabla \psi(Y), X - Y \rangle + \tfrac{\alpha}{2} \lVert X - Y \rVert^2$$

    in the norm of $\nabla \psi(Y) \nabla \psi(Y)^\top$, the regret after $T$ rounds is at most $\frac{m}{2 \alpha}
    \log(1 + T L_G^2 / \epsilon) + \alpha \epsilon D^2 / 2$, with $L_G$ the largest norm of a gradient and $D$ the
    diameter of $K$. For $\frac{1}{2} \lVert W^\top x - y \rVert^2$ with $\lVert x \rVert \le 1$, $\lVert y \rVert \le
    r$ and the spectral ball of radius $r$, $\alpha = 1 / (4 r^2)$ does.

    With $d$ the size of $L$ and $D$ the other dimension, a step costs $2 d^2 D$ FLOPs for the direction and two to
    three times as many for the inverse (with $D \le d$); a projection of a point outside the ball adds an
    eigendecomposition. The state has $d^2$ entries, in float64 where the device supports it.

    Examples:
        >>> w = nn.Parameter(torch.zeros(3, 2))
        >>> optimizer = ngplus.OnlineNGPlus([w], alpha=0.25, radius=1.0, ball="spectral")
        >>> for x, y in zip(torch.eye(3), torch.ones(3, 2)):  # a stream: one example a round
        ...     optimizer.zero_grad()
        ...     loss = 0.5 * (w.T @ x - y).square().sum()
        ...     loss.backward()
        ...     optimizer.step()
        >>> bool(torch.linalg.matrix_norm(w, 2) <= 1.0 + 1e-6)
        True

    Args:
        params (iterable): parameters, named parameters or parameter groups as in torch.optim. Each parameter is a
            matrix with its own ball: dimension 0 is m, the others are n; a vector is (m, 1).
        alpha (float): the constant of the losses; $1/\alpha$ is the step size (default: 1.0).
        eps (float): $L_0 = \epsilon I$. None is the theorem's $2 / (\alpha D^2)$, with $D$ the Frobenius diameter of
            the ball, or 1 without a ball (default: None).
        radius (float): radius of the ball $K$ around 0; None for no constraint (default: None).
        ball (str): ``"frobenius"`` or ``"spectral"`` (the largest singular value) (default: ``"frobenius"``).
        norm (str): the norm of the projection: ``"curvature"``, that of $L_t$, which the regret bound needs, or
            ``"plain"`` (default: ``"curvature"``).
        side (str): ``"left"``, the paper's; ``"right"``, with $G_t^\top G_t$ behind the gradient; ``"auto"``, the
            smaller one. The bound holds on the left for a loss of $W^\top x$, on the right for one of $W x$, as in
            nn.Linear (default: ``"left"``).
        tolerance (float): tolerance of a projection onto the spectral ball, relative to the norm of what is projected
            (default: 1e-9).
        maximize (bool): maximize the objective (default: False).
    """

    def __init__(
        self,
        params: ParamsT,
        alpha: float = 1.0,
        *,
        eps: float | None = None,
        radius: float | None = None,
        ball: str = "frobenius",
        norm: str = "curvature",
        side: str = "left",
        tolerance: float = 1e-9,
        maximize: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "alpha": alpha, "eps": eps, "radius": radius, "ball": ball, "norm": norm, "side": side,
            "tolerance": tolerance, "maximize": maximize,
        }  # fmt: skip
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim."""
        if isinstance(param_group, dict):
            _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point():
                name = self._name(param)
                self.param_groups.pop()
                raise ValueError(
                    f"Parameter {name} is {param.dtype}; OnlineNGPlus needs real floating-point parameters"
                )

    def _name(self, param: Tensor) -> str:
        """The name that the user gave, or the position in its group."""
        for g, group in enumerate(self.param_groups):
            for i, own in enumerate(group["params"]):
                if own is param:
                    return str(group["param_names"][i] if "param_names" in group else f"{i} of group {g}")
        raise KeyError(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs one round: updates the inverse of $L_t$, steps and projects."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # options may have been changed since the last step
            _check(group)
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        for param, _ in work:
            if param.grad.is_sparse:
                raise RuntimeError(
                    f"OnlineNGPlus does not support the sparse gradient of parameter {self._name(param)}: use "
                    "sparse=False in its embedding"
                )
            if not bool(param.grad.isfinite().all()):
                raise RuntimeError(
                    f"The gradient of parameter {self._name(param)} is not finite; no parameter was changed"
                )
        for param, group in work:
            self._round(param, group, self.state[param])
        return loss

    def _round(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert param.grad is not None
        weight, gradient = _as_matrix(param), _as_matrix(param.grad)
        transposed = group["side"] == "right" or (group["side"] == "auto" and weight.shape[0] > weight.shape[1])
        if transposed:
            weight, gradient = weight.mT, gradient.mT
        if not state:
            state["step"] = 0
            state["inverse"] = torch.eye(len(weight)).to(weight) / _epsilon(group, weight.shape)
            state["projection_bound"] = 0.0  # the largest certificate so far
        woodbury_update(state["inverse"], gradient)
        step = state["inverse"] @ gradient / group["alpha"]
        point = weight + step if group["maximize"] else weight - step
        if group["radius"] is not None:
            inverse = state["inverse"] if group["norm"] == "curvature" else None
            done = project(point, group["radius"], group["ball"], inverse, group["tolerance"])
            state["projection_bound"] = max(state["projection_bound"], done.bound)
            point = done.point
        state["step"] += 1
        param.copy_((point.mT if transposed else point).reshape(param.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but the inverse is not cast to the parameter's dtype."""
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            if "inverse" in state_dict["state"].get(i, {}):
                saved = state_dict["state"][i]["inverse"]
                self.state[param]["inverse"] = saved.detach().clone().to(param.device, wide(param))


def woodbury_update(inverse: Tensor, columns: Tensor) -> Tensor:
    """P <- (P^-1 + U U^T)^-1 = P - P U (I + U^T P U)^-1 U^T P, in place, for P (d x d) and U (d x r).

    More than d columns are first reduced to d with the same U U^T by a QR decomposition. The columns are then added in
    at most two chunks of at most d/2. FLOPs: 4 d^2 r for the products with P, and 3 d s^2 + s^3/3 for each chunk of s.
    """
    d, r = columns.shape
    if r > d:
        columns = torch.linalg.qr(columns.mT, mode="r").R.mT
    for chunk in columns.split(max(1, math.ceil(d / 2)), dim=1):
        product = inverse @ chunk
        core = chunk.mT @ product
        core.diagonal().add_(1.0)
        # P U C^-1 U^T P = X^T X, which stays symmetric and positive semi-definite under rounding
        root = torch.linalg.solve_triangular(torch.linalg.cholesky(core), product.mT, upper=False)
        change = root.mT @ root
        inverse.sub_((change + change.mT) / 2)  # a matrix product may round its two triangles differently
    return inverse


def project(
    point: Tensor, radius: float, ball: str, inverse: Tensor | None = None, tolerance: float = 1e-9
) -> Projection:
    r"""Returns $\operatorname{argmin}_Z \lVert Z - V \rVert_L$ over a ball, for the matrix $V$.

    Args:
        point (Tensor): $V$.
        radius (float): the radius of the ball.
        ball (str): ``"frobenius"`` or ``"spectral"``.
        inverse (Tensor): the inverse of $L$; None for $L = I$ (default: None).
        tolerance (float): as in ``OnlineNGPlus`` (default: 1e-9).

    Examples:
        >>> done = ngplus.online.project(3 * torch.eye(2), 1.0, "spectral", inverse=torch.eye(2))
        >>> torch.allclose(done.point, torch.eye(2), atol=1e-6)
        True
    """
    choice("ball", ball, BALLS)
    if float(torch.linalg.matrix_norm(point, 2 if ball == "spectral" else "fro")) <= radius:
        return Projection(point, 0.0, 0)
    if inverse is None:
        return Projection(_clip(point, radius) if ball == "spectral" else _scaled(point, radius), 0.0, 0)
    values, basis = torch.linalg.eigh(inverse)
    # Rounding may leave a tiny eigenvalue at or below zero.
    weights = values.clamp_min(torch.finfo(values.dtype).eps * float(values[-1])).reciprocal()[:, None]
    rotated = basis.mT @ point
    if ball == "frobenius" or min(point.shape) == 1:  # for a vector both balls are the same
        done = project_frobenius(rotated, weights, radius)
    else:
        done = project_spectral(rotated, weights, radius, tolerance)
    return Projection(basis @ done.point, done.bound, done.iterations)


def project_frobenius(point: Tensor, weights: Tensor, radius: float) -> Projection:
    """argmin sum_i l_i ||z_i - v_i||^2 over ||Z||_F <= r, for rows v_i of V and weights l_i (d x 1).

    L (Z - V) + nu Z = 0, so z_i = v_i l_i / (l_i + nu), with nu >= 0 the root of ||Z(nu)||_F = r. Newton's method finds
    it on 1 / ||Z(nu)||, which is nearly linear in nu, safeguarded by bisection.
    """
    squares = point.square().sum(1, keepdim=True)
    excess = float(squares.sum().sqrt()) / radius - 1.0
    low, high = excess * float(weights.min()), excess * float(weights.max())
    nu, iterations = low, 0
    for iterations in range(1, 200):  # noqa: B007
        shrink = weights / (weights + nu)
        size = float((squares * shrink.square()).sum().sqrt())
        if abs(size / radius - 1.0) <= 4 * torch.finfo(point.dtype).eps:
            break
        low, high = (nu, high) if size > radius else (low, nu)
        slope = -float((squares * shrink.square() / (weights + nu)).sum()) / size  # of ||Z(nu)||
        nu = nu + (size / slope) * (1.0 - size / radius)
        if not low < nu < high:
            nu = 0.5 * (low + high)
            if not low < nu < high:
                break
    inside = _scaled(point * weights / (weights + nu), radius)
    return Projection(inside, _certificate(inside, point, nu * inside, weights), iterations)


def project_spectral(point: Tensor, weights: Tensor, radius: float, tolerance: float) -> Projection:
    """argmin sum_i l_i ||z_i - v_i||^2 over ||Z||_2 <= r, for rows v_i of V and weights l_i (d x 1).

    ADMM on W = Z: W <- (L V + rho (Z - U)) / (L + rho), Z <- clip(W + U), U <- U + W - Z, where clip bounds the
    singular values by r. rho U is in the normal cone at Z, so each iterate has a certificate. The iteration ends when
    it is below ``tolerance`` times ||V||_L, and warns where that is not reached. rho is balanced at first and then
    constant, as the convergence of ADMM requires.
    """
    goal = tolerance * float((weights * point.square()).sum().sqrt())
    rho = float((weights.min() * weights.max()).sqrt())
    z = _clip(point, radius)
    u = weights * (point - z) / rho
    best = Projection(z, math.inf, 0)
    for iteration in range(1, MAX_ITERATIONS + 1):
        w = (weights * point + rho * (z - u)) / (weights + rho)
        mixed = RELAXATION * w + (1.0 - RELAXATION) * z + u
        before, z = z, _clip(mixed, radius)
        u = mixed - z
        bound = _certificate(z, point, rho * u, weights)
        if bound < best.bound:
            best = Projection(z, bound, iteration)
        if bound <= goal:
            return best
        if iteration % 10 == 0 and iteration <= BALANCED:
            primal, dual = float((w - z).norm()), float((z - before).norm())
            factor = min(10.0, max(0.1, (primal / dual) ** 0.75)) if primal > 0 and dual > 0 else 1.0
            rho, u = rho * factor, u / factor
    warnings.warn(
        f"The projection onto the spectral ball stopped after {MAX_ITERATIONS} iterations, within {best.bound:.1e} of "
        f"the exact one in the norm of L; the tolerance asks for {goal:.1e}. The result is used. A larger tolerance "
        "needs fewer iterations",
        stacklevel=2,
    )
    return best._replace(iterations=MAX_ITERATIONS)


def _certificate(z: Tensor, point: Tensor, normal: Tensor, weights: Tensor) -> float:
    """||Z - V + L^-1 Y||_L for Z in the ball and Y in its normal cone there: a bound on ||Z - Proj(V)||_L."""
    return float((weights * (z - point + normal / weights).square()).sum().sqrt())


def _clip(point: Tensor, radius: float) -> Tensor:
    """Clips the singular values at r: the projection onto the spectral ball in the Frobenius norm."""
    left, values, right = torch.linalg.svd(point, full_matrices=False)
    return left * values.clamp_max(radius) @ right


def _scaled(point: Tensor, radius: float) -> Tensor:
    return point * (radius / torch.linalg.vector_norm(point))


def _as_matrix(tensor: Tensor) -> Tensor:
    """(m, n) in float64: dimension 0 is m."""
    matrix = tensor.detach().to(wide(tensor))
    return matrix.reshape(len(tensor), -1) if tensor.dim() > 0 else matrix.reshape(1, 1)


def _epsilon(group: dict[str, Any], shape: torch.Size) -> float:
    """The theorem's eps = 2 / (alpha D^2): D = 2 r for the Frobenius ball, 2 r sqrt(min(m, n)) for the spectral one."""
    if group["eps"] is not None:
        return float(group["eps"])
    if group["radius"] is None:
        return 1.0
    rank = min(shape) if group["ball"] == "spectral" else 1
    return float(2.0 / (group["alpha"] * 4.0 * group["radius"] ** 2 * rank))


def _check(options: dict[str, Any]) -> None:
    """Raises ValueError for the first invalid option."""
    for name, optional in (("alpha", False), ("eps", True), ("radius", True), ("tolerance", False)):
        value = options[name]
        if value is None and optional:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0.0 < value < math.inf:
            raise ValueError(f"Invalid {name}: {value!r} (a number above 0)")
    for name, choices in (("ball", BALLS), ("norm", NORMS), ("side", SIDES)):
        choice(name, options[name], choices)
