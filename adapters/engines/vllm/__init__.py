"""vLLM: a rollout engine, and the way of weights to its processes."""
