"""Prompts from datasets and procedural tasks, replies in files, and the examples of offline trainers."""
