"""The operating system: time."""
