"""The laboratory: workloads, rivals, comparisons, figures and benchmarks, on the public names of ngplus alone.

It is an extra (``pip install ngplus[lab]``); ``import ngplus`` does not load it.
"""
