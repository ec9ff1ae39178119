"""Functions on tensors alone: from factors of per-sample gradients to L or R, and to their inverses."""
