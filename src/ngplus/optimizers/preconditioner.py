"""The curvature of NG+ in front of any torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ngplus.diagnostics.health import Health
from ngplus.diagnostics.plan import Plan
from ngplus.optimizers.ngplus import NGPlus
from ngplus.preconditioners.ngplus_curvature import Curvature


class Preconditioner:
    r"""Replaces each ``.grad`` by its NG+ direction, $(\lambda I + L)^{-1} G$ or $G (\lambda I + R)^{-1}$.

    Another optimizer makes the step. It should be SGD: Adam would scale each number again. Do not use a GradScaler.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> preconditioner = ngplus.Preconditioner(model, damping=0.1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> preconditioner.step()
        >>> optimizer.step()

    Args:
        model (Module or iterable): the module, or parameters with ``model=`` or ``curvature="batch"``.
        options: the arguments of ``NGPlus``, but ``lr``, ``momentum``, ``nesterov``, ``weight_decay`` and ``maximize``,
            which are the other optimizer's. With ``graft="adam"``, ``momentum`` is that of Adam's first moment.
    """

    def __init__(self, model: nn.Module | Any, **options: Any) -> None:
        of_the_step = {"lr", "nesterov", "momentum", "weight_decay", "maximize"}
        if options.get("graft") == "adam":
            of_the_step -= {"momentum"}
        if foreign := of_the_step & set(options):
            raise TypeError(
                f"Preconditioner has no argument {', '.join(sorted(foreign))}: pass it to the other optimizer"
            )
        self._optimizer = NGPlus(model, lr=1.0, **{"momentum": 0.0, **options})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, in which a schedule can change ``damping`` and ``update_every``."""
        return self._optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Replaces each gradient by its direction, a new tensor, or by zeros if that is not finite."""
        self._optimizer._replace_gradients()

    def plan(
        self, batch_size: int | None = None, positions: int | Mapping[str, int] = 1, *, verbose: bool = False
    ) -> Plan:
        """See :meth:`ngplus.NGPlus.plan`."""
        return self._optimizer.plan(batch_size, positions, verbose=verbose)

    def health(self, eigenvalues: bool = False) -> Health:
        """See :meth:`ngplus.NGPlus.health`."""
        return self._optimizer.health(eigenvalues)

    def curvature(self, which: str | nn.Parameter) -> Curvature:
        """See :meth:`ngplus.NGPlus.curvature`."""
        return self._optimizer.curvature(which)

    def state_dict(self) -> dict[str, Any]:
        """Returns the curvature and the options, as a torch optimizer does."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state from ``state_dict``."""
        self._optimizer.load_state_dict(state_dict)
