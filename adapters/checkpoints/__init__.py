"""Models and run state on the local disk."""
