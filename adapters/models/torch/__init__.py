"""In-process training with PyTorch on transformers models."""
