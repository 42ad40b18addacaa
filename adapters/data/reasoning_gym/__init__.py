"""Prompts and rewards from reasoning-gym's procedural tasks."""
