"""Rewards from built-in verifiers and from Python files."""
