"""The layers of transformers over a packed batch: attention, recurrence, norms, positions, and images before them."""
