"""Command lines of verl, translated."""
