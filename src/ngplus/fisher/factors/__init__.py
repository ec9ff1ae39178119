"""Per-sample gradients as factors, without computing each G_i.

A layer rule returns the per-sample gradients G_i (m x n) of a matrix as a :class:`Factors`:

========== ==================================================== ============================================
class      G_i                                                  where
========== ==================================================== ============================================
Outer      sum over positions p of l_ip r_ip^T                  Linear, Conv, attention
Segments   the same, any number of positions for each sample    Linear on graphs or sequences of several sizes
Lookup     sum over positions p of e_index(ip) v_ip^T           Embedding, several bags a sample
Bags       (sum over entries j of w_j e_index(j)) g_i^T         EmbeddingBag
Rows       G_i itself                                           norm layers
OnDemand   G_i itself, computed for some samples at a time      modules without a rule, weights that are computed
Parts      as one of the above, for some samples at a time   those that would be copies of inputs and gradients
Joined     the sum of several of the above, same samples        tied weights, modules called several times
========== ==================================================== ============================================

:mod:`ngplus.fisher.products` computes L or R from them.
"""

from ngplus.fisher.factors.base import Factors, LazyFactor, LazyGradients, tensor_version, wide
from ngplus.fisher.factors.outer import OnDemand, Outer, Rows, SomeRows, gram_root, outer_costs
from ngplus.fisher.factors.parts import Parts, at_once
from ngplus.fisher.factors.ragged import Segments
from ngplus.fisher.factors.tables import Bags, Lookup, as_lookup
from ngplus.fisher.factors.tied import Joined, join, widen

__all__ = [
    "Bags", "Factors", "Joined", "LazyFactor", "LazyGradients", "Lookup", "OnDemand", "Outer", "Parts", "Rows",
    "Segments", "SomeRows", "as_lookup", "at_once", "gram_root", "join", "outer_costs", "tensor_version", "wide",
    "widen",
]  # fmt: skip
