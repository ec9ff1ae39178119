"""KFAC and SENG with the capture of NG+. ``docs/baselines.md`` says what each of them computes."""

from ngplus.baselines.kfac import KFAC, KroneckerFactors
from ngplus.baselines.seng import SENG

__all__ = ["KFAC", "SENG", "KroneckerFactors"]
