"""Sinks of a run's metrics, and the report."""
