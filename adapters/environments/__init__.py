"""Environments of other libraries behind the port `Environment`."""
