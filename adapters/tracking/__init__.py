"""Sinks of a run's metrics (files, console, experiment trackers), and its rollouts, kept token by token."""
