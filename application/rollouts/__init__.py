"""Rollouts: playing, choosing and measuring groups of episodes."""
