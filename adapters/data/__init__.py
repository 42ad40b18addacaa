"""Prompts from data sets and procedural tasks, and the examples of offline trainers."""
