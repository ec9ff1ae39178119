"""Rules of layers, and the registry that rules of other layers are added to (docs/layer-rules.md)."""

from ngplus.capture.layers import *  # noqa: F403
from ngplus.capture.layers import __all__ as __all__
