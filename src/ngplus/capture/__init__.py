"""Per-sample gradients of a model's layers, captured by hooks and accumulated to L or R.

On a refresh step, in order:

1. ``matrices.py`` has the matrices W (m x n) of the model; ``layers/`` has a rule for each layer type.
2. ``sample_tracker.py`` follows the samples from the inputs of the model to each layer, by the rules of
   ``axis_rules.py`` and ``axis_indexing.py`` for torch functions.
3. ``layers/hooks.py``: a forward hook on each layer passes its input and output to the recorder.
4. ``recorder.py`` puts a tensor hook on the output. When its gradient arrives, the rule builds the factors of G_i,
   [groups, samples, positions, features]. ``layers/base.py`` defines their shapes.
   ``batch.py`` splits inputs and gradients by samples.
5. ``collector.py`` adds the products of the factors, sum_i G_i G_i^T or sum_i G_i^T G_i, to the accumulator of the
   matrix (``accumulator.py``), which the optimizer takes at the step.
"""
