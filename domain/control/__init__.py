"""Pure state machines that steer a run, and findings about it."""
