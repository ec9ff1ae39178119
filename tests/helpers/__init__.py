"""Helpers of the tests: a plain reference, small models and their training, cases of layers, and a pool of ranks."""
