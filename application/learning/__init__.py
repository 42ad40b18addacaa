"""Learning: makes optimizer steps from trajectories."""
