"""What several rules need. See `validation`."""

import math
from typing import Any

import attrs

from rollgrad.application.config import (
    RLConfig,
)


def first_change(section: Any, default: Any) -> str | None:
    """Dotted name within `section` of the first field that differs from `default`."""
    for field in attrs.fields(type(section)):
        value, unchanged = getattr(section, field.name), getattr(default, field.name)
        if value != unchanged:
            inner = first_change(value, unchanged) if attrs.has(type(value)) else None
            return f"{field.name}.{inner}" if inner else field.name
    return None


def optimizer_steps_per_rollout(config: RLConfig) -> int:
    """Optimizer steps that one rollout feeds: passes over its samples times mini-batches of a pass."""
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return config.train.max_epochs * math.ceil(samples / (config.train.batch_size or samples))
