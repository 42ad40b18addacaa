"""Runs: rollouts and updates in turn or at once, with evaluation, checkpoints and early ends."""
