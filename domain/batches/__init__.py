"""Sequences laid end to end, how a batch is divided, and how metrics of its parts are combined."""
