"""Mixtures of experts: balance of their routers, experts divided over processes, replay of routing."""
