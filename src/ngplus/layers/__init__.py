"""The layers room: a rule for each layer type, in a registry that users can extend.

On the way from gradient to step: capture hands a layer's input and output gradient in, factors of G_i come out.
"""

from ngplus.layers.attention import MultiheadAttentionRule
from ngplus.layers.batch import Batch
from ngplus.layers.conv import ConvRule, ConvTransposeRule
from ngplus.layers.embedding import EmbeddingBagRule, EmbeddingRule
from ngplus.layers.linear import LinearRule, TransposedLinearRule, linear_factors
from ngplus.layers.matrix import Layout, MatrixSpec
from ngplus.layers.norm import BatchNormRule, GroupNormRule, InstanceNormRule, LayerNormRule, NormRule, RMSNormRule
from ngplus.layers.rule import LayerRule, NotPerSample, Watcher, register_layer, rule_for
from ngplus.layers.unknown import UnknownModuleRule

__all__ = [
    "Batch",
    "BatchNormRule",
    "ConvRule",
    "ConvTransposeRule",
    "EmbeddingBagRule",
    "EmbeddingRule",
    "GroupNormRule",
    "InstanceNormRule",
    "LayerNormRule",
    "LayerRule",
    "Layout",
    "LinearRule",
    "MatrixSpec",
    "MultiheadAttentionRule",
    "NormRule",
    "NotPerSample",
    "RMSNormRule",
    "TransposedLinearRule",
    "UnknownModuleRule",
    "Watcher",
    "linear_factors",
    "register_layer",
    "rule_for",
]
