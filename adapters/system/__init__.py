"""Helpers that adapters share: clock, signals, memory and processes, event loops, and bounds on HTTP answers."""
