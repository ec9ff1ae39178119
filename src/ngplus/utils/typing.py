"""Names of types."""

from __future__ import annotations

from typing import Any

State = dict[str, Any]  # of a parameter, in ``optimizer.state``
Group = dict[str, Any]  # a parameter group: its parameters and options
