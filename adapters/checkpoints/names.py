"""Names of the files in a run's directory; importable without torch."""

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TRAINING_STATE = "training_state.pt"
