"""Playing, choosing and measuring groups of episodes."""
