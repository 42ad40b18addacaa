"""How groups of episodes are played, chosen and measured."""
