"""Containers of runs that learn from examples."""
