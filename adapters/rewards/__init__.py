"""Rewards from functions, verifiers, reward models, HTTP servers, and language models that judge."""
