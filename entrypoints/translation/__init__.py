"""Turns words into flags and flags into settings, for translations of all other tools' command lines."""
