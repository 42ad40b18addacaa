"""Prompts from files and the Hugging Face hub."""
