"""Agents as functions and as programs."""
