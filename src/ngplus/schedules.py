"""Schedules of the damping. For learning rates use torch.optim.lr_scheduler: ``docs/settings.md`` shows the paper's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["ExponentialDamping", "LambdaDamping"]


class HasGroups(Protocol):
    """An optimizer, or a ``Preconditioner``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


def _initial(group: dict[str, Any]) -> dict[str, float]:
    """The initial damping and relative_damping; of a group added later, those at the next call of the schedule."""
    if "damping" not in group:
        raise ValueError("The optimizer has no damping to schedule: damping schedules are for NGPlus, KFAC and SENG")
    options = [name for name in ("damping", "relative_damping") if name in group]
    return {name: float(group.setdefault(f"initial_{name}", group[name])) for name in options}


class LambdaDamping:
    """Multiplies the initial ``damping`` and ``relative_damping`` of each parameter group by ``factor(epoch)``.

    ``step()`` advances by one epoch, like a torch scheduler; ``step(epoch)`` sets the epoch, which may be a fraction.

    Args:
        optimizer (NGPlus, Preconditioner, KFAC or SENG): the optimizer whose damping is scheduled.
        factor (callable): from the epoch to the factor.

    Examples:
        >>> optimizer = ngplus.NGPlus(nn.Linear(3, 2), damping=0.4)
        >>> damping = ngplus.schedules.LambdaDamping(optimizer, lambda epoch: 0.5**epoch)
        >>> damping.step()
        >>> damping.get_last_damping()
        [0.2]
    """

    def __init__(self, optimizer: HasGroups, factor: Callable[[float], float]) -> None:
        for group in optimizer.param_groups:
            _initial(group)
        self.optimizer, self.factor, self.epoch = optimizer, factor, 0.0
        self._set()

    def step(self, epoch: float | None = None) -> None:
        """Advances by one epoch, or to the given one."""
        self.epoch = self.epoch + 1.0 if epoch is None else float(epoch)
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group.update({name: value * self.factor(self.epoch) for name, value in _initial(group).items()})

    def get_last_damping(self) -> list[float]:
        """Returns the ``damping`` of each group."""
        return [group["damping"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch; the factor is not saved."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the epoch and the damping."""
        self.epoch = float(state_dict["epoch"])
        self._set()


class ExponentialDamping(LambdaDamping):
    r"""Multiplies the initial damping by $\text{rate}^{\text{epoch} / \text{every}}$.

    The paper has rate 0.8 or 0.87.

    Args:
        optimizer (NGPlus, Preconditioner, KFAC or SENG): the optimizer whose damping is scheduled.
        rate (float): the factor for ``every`` epochs.
        every (float): a number of epochs (default: 10).

    Examples:
        >>> optimizer = ngplus.NGPlus(nn.Linear(3, 2), lr=0.18, damping=0.16)
        >>> damping = ngplus.schedules.ExponentialDamping(optimizer, rate=0.8)
        >>> for epoch in range(20):  # after each epoch of training
        ...     damping.step()
        >>> round(optimizer.param_groups[0]["damping"], 4)
        0.1024
    """

    def __init__(self, optimizer: HasGroups, rate: float, every: float = 10.0) -> None:
        if not rate > 0.0:
            raise ValueError(f"Invalid rate: {rate} (a number above 0)")
        if not every > 0.0:
            raise ValueError(f"Invalid every: {every} (a number above 0)")
        self.rate, self.every = rate, every
        super().__init__(optimizer, lambda epoch: rate ** (epoch / every))
