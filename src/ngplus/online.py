"""The online method of the paper's regret section, and its projections."""

from ngplus.optimizers.online import OnlineNGPlus, Projection, project

__all__ = ["OnlineNGPlus", "Projection", "project"]
