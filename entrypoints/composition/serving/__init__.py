"""Models that answer people and programs outside of runs."""
