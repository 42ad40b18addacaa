"""Pure state machines that steer a run (staleness, KL weight, learning rate, health of engines), and findings."""
