"""Engines that others serve, spoken to by URL."""
