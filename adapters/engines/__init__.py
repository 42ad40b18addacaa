"""Models that sample: in this process, in vLLM, or behind a URL."""
