"""Isolation of code that a model wrote, and of code that judges a model's text."""
