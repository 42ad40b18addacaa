"""How an episode is played."""
