"""Modules under an optimizer: master weights, steps, moving averages, and their stored state."""
