"""Token losses and how they become one number."""
