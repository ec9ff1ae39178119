"""A rule for each layer type, in a registry that users can extend: ``base.py`` has the contract of a rule."""

from ngplus.capture.batch import Batch
from ngplus.capture.layers.attention import MultiheadAttentionRule
from ngplus.capture.layers.base import LayerRule, NotPerSample, register_layer, rule_for
from ngplus.capture.layers.cell import CellRule
from ngplus.capture.layers.conv import ConvRule, ConvTransposeRule
from ngplus.capture.layers.embedding import EmbeddingBagRule, EmbeddingRule
from ngplus.capture.layers.hooks import Watcher
from ngplus.capture.layers.layout import Layout, MatrixSpec
from ngplus.capture.layers.linear import LinearRule, TransposedLinearRule, linear_factors
from ngplus.capture.layers.norm import (
    BatchNormRule,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    NormRule,
    RMSNormRule,
)
from ngplus.capture.layers.vmap import UnknownModuleRule

__all__ = [
    "Batch", "BatchNormRule", "CellRule", "ConvRule", "ConvTransposeRule", "EmbeddingBagRule", "EmbeddingRule",
    "GroupNormRule", "InstanceNormRule", "LayerNormRule", "LayerRule", "Layout", "LinearRule", "MatrixSpec",
    "MultiheadAttentionRule", "NormRule", "NotPerSample", "RMSNormRule", "TransposedLinearRule", "UnknownModuleRule",
    "Watcher", "linear_factors", "register_layer", "rule_for",
]  # fmt: skip
