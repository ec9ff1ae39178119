"""What the model's passes tell about samples: hooks, layer rules, and the sums of products of a refresh."""
