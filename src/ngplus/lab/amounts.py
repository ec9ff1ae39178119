"""Amounts as people read them."""

from __future__ import annotations


def amount(number: float, unit: str = "") -> str:
    """In thousands, with three digits: 553 kB, 2.06 TFLOP."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    return f"{number:.3g} {prefixes[0]}{unit}".strip()
