"""What shuts code in that a model wrote, or that judges what a model wrote."""
