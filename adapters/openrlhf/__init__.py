"""Runs agent files written for OpenRLHF."""
