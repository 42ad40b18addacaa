"""Implementations of the ports: each package implements one with a library, which it imports only when it is used."""
