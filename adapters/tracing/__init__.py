"""Spans of episodes for OpenTelemetry."""
