"""Command lines of TRL, translated."""
