"""Generation with transformers models in this process."""
