"""Helpers without a place of their own in the algorithm."""
