"""Models and training states on disk, the lock of a run's directory, and models on the Hugging Face hub."""
