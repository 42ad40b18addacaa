"""Prompts from datasets and procedural tasks, and the examples of offline trainers."""
