"""Learning rates over a run, by the names that transformers has for them."""

SCHEDULERS = {
    "constant": ("constant", False, None),
    "constant_with_warmup": ("constant", True, None),
    "linear": ("linear", True, 0.0),
    "cosine": ("cosine_with_min_lr", True, 0.0),
    "warmup_stable_decay": ("warmup_stable_decay", True, 0.0),
}
"""Schedules by Hugging Face's name: our name, whether it warms up, and its floor if that is fixed. Others become
cosine_with_min_lr."""
