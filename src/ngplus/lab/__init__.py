"""Workloads, training, tuning, comparisons, figures and benchmarks; it uses the public names of ngplus only.

It is an extra (in the project's folder, ``pip install '.[lab]'``); ``import ngplus`` does not load it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The ``ngplus`` command."""
    try:
        from ngplus.lab.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"The ngplus command needs {error.name}: run pip install '.[lab]' in the project's folder")
    except KeyboardInterrupt:  # the imports take a second or two
        sys.exit(130)
    app()
