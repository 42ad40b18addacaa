"""Command lines of OpenRLHF, translated."""
