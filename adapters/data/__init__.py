"""Prompts: data sets and procedural tasks."""
