"""Clients of HTTP services."""
