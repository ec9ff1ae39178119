"""Rivals of NG+ on the same capture: KFAC and SENG. ``docs/baselines.md`` has what each of them computes.

On the way from gradient to step: the same as NG+'s; each rival has its own refresh and direction.
"""

from ngplus.baselines.kfac import KFAC, KroneckerFactors
from ngplus.baselines.seng import SENG

__all__ = ["KFAC", "SENG", "KroneckerFactors"]
