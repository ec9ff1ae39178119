"""Real architectures, small and with random weights: ``tools/architecture_table.py`` makes a page of them."""
