"""From trajectories to optimizer steps."""
