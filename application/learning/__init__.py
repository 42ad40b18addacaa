"""Learning: from trajectories or examples to optimizer steps."""
