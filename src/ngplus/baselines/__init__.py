"""Rivals of NG+ on the same capture: KFAC and SENG. ``docs/baselines.md`` has what each of them computes."""

from ngplus.baselines.kfac import KFAC, KroneckerFactors
from ngplus.baselines.seng import SENG

__all__ = ["KFAC", "SENG", "KroneckerFactors"]
