"""Trajectories laid end to end, and how a batch is divided."""
