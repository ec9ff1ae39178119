"""Writes docs/architectures.md: the curvature that NGPlus captures of real architectures, against brute force."""

import sys

sys.path.insert(0, "tests")
