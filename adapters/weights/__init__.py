"""The way of weights from the trainer to engines."""
