"""Estimators, losses, shaping, filtering, and the catalogue of what each asks of a run."""
