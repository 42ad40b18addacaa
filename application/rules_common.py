"""What several rules need. See `validation`."""

import math
from typing import Any

import attrs

from rollgrad.application.config import RLConfig


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


def ranks(config: RLConfig, model: str = "actor") -> int:
    """Processes of `actor`, `critic`, `ref` or `reward`."""
    section, actor = getattr(config, model), config.actor
    return int((section.num_nodes or actor.num_nodes) * (section.num_gpus_per_node or actor.num_gpus_per_node))


def tokens_per_pass(config: RLConfig) -> int:
    """Token budget of one forward and backward pass, over all processes of the actor."""
    return config.train.max_tokens_per_micro_batch * ranks(config)


def longest_sequence(config: RLConfig) -> int:
    """Tokens of a prompt and its reply at most."""
    separately = config.data.prompt_limit + config.rollout.max_new_tokens
    return separately if config.data.max_len is None else min(config.data.max_len, separately)
