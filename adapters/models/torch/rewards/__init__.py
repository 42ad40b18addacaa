"""Models of numbers instead of tokens: reward models, process reward models, critics."""
