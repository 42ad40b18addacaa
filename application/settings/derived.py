"""Values that several rules compute from settings (`validation`)."""

import math
from typing import Any

import attrs

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import PARAMETERS
from rollgrad.domain.algorithms.settings import KLAgainst

SEQUENCES_AT_ONCE = 128
"""Sequences decoded together where nothing is set."""


def first_change(section: Any, default: Any) -> str | None:
    """Dotted name within `section` of the first field that differs from `default`."""
    for field in attrs.fields(type(section)):
        value, unchanged = getattr(section, field.name), getattr(default, field.name)
        if value != unchanged:
            inner = first_change(value, unchanged) if attrs.has(type(value)) else None
            return f"{field.name}.{inner}" if inner else field.name
    return None


def samples_per_rollout(config: RLConfig) -> int:
    """Samples that one update trains on, each with all its branches."""
    return config.rollout.batch_size * config.rollout.n_samples_per_prompt


def sequences_at_once(config: RLConfig) -> int:
    """Sequences that an engine decodes together at most, where vLLM does not choose by the GPU."""
    return config.rollout.max_batch_size or SEQUENCES_AT_ONCE


def optimizer_steps_per_rollout(config: RLConfig) -> int:
    """Optimizer steps that one rollout feeds: passes over its samples times mini-batches of a pass."""
    samples = samples_per_rollout(config)
    return config.train.max_epochs * math.ceil(samples / (config.train.batch_size or samples))


def optimizer_steps(config: RLConfig, rollouts: int) -> int:
    """Returns the number of optimizer steps in `rollouts`."""
    return rollouts * optimizer_steps_per_rollout(config)


def optimizer_steps_of_actor(config: RLConfig, rollouts: int) -> int:
    """Returns the number of optimizer steps of the actor in `rollouts`: it is frozen while the critic warms up."""
    return optimizer_steps(config, rollouts - config.critic.freezing_steps)


def longest_reply(config: RLConfig, *, plays: bool) -> int | None:
    """Sampled tokens of an episode at most, which penalties of length go by: `rollout.max_new_tokens` of a single
    reply; where episodes have several turns (`plays`) `rollout.max_episode_tokens` or `data.max_len`, None without
    either."""
    if plays:
        return config.rollout.max_episode_tokens or config.data.max_len
    return config.rollout.max_new_tokens


def longest_sequence(config: RLConfig, *, plays: bool) -> int | None:
    """Tokens at most of a prompt and its reply, also in evaluation, or of an episode of several turns (`plays`); None
    is as many as the model has positions."""
    if plays:
        return config.rollout.max_episode_tokens or config.data.max_len
    return _with_reply(config, max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0))


def longest_sample(config: RLConfig) -> int:
    """Tokens of a prompt and its reply, or of an episode of several turns, at most, of those that are trained on. An
    episode that no setting bounds is taken for a prompt and a reply."""
    plays = config.agent.plays or config.train.agent_func_path is not None
    bound = longest_sequence(config, plays=True) if plays else None
    return bound or _with_reply(config, config.rollout.max_new_tokens)


def _with_reply(config: RLConfig, reply: int) -> int:
    separately = config.data.prompt_limit + reply
    return separately if config.data.max_len is None else min(config.data.max_len, separately)


def moves_reference(config: RLConfig) -> bool:
    """Whether the reference is a moving average of the policy's weights, in the policy's processes."""
    kl = config.algo.kl
    return kl.init_coef > 0 and kl.against is KLAgainst.REFERENCE and kl.ref_sync_steps is not None


def keeps_average(config: RLConfig) -> bool:
    """Whether a moving average of the actor's weights is kept, in the machine's memory."""
    return config.train.enable_ema or moves_reference(config)


def ranks(config: RLConfig | OfflineRun, model: str = "actor") -> int:
    """Processes of `actor`, `critic`, `ref` or `reward`."""
    section, actor = getattr(config, model), config.actor
    return int((section.num_nodes or actor.num_nodes) * (section.num_gpus_per_node or actor.num_gpus_per_node))


def divides_reward(config: RLConfig) -> bool:
    """Whether the processes of a reward model divide its parameters, as they do the reference's; where processes share
    layers each has it whole."""
    by_zero = config.ds.zero_stage == PARAMETERS or config.reward.offload
    return config.cluster.strategy is Strategy.FSDP2 or (by_zero and config.ds.tensor_parallel_size == 1)


def tokens_per_pass(config: RLConfig | OfflineRun) -> int:
    """Token budget of one forward and backward pass, over all processes of the actor; those that share layers compute
    the same tokens."""
    return config.train.max_tokens_per_micro_batch * ranks(config) // config.ds.tensor_parallel_size


def tokens_per_scoring_pass(config: RLConfig) -> int:
    """Token budget of one forward pass without gradients, over all processes of the actor; as `tokens_per_pass`."""
    budget = config.train.max_tokens_per_scoring_pass or config.train.max_tokens_per_micro_batch
    return budget * ranks(config) // config.ds.tensor_parallel_size


def shares_of_pass(config: RLConfig | OfflineRun) -> int:
    """Equal shares of that budget: one for each process, or group of processes that share the layers or sequences."""
    width = config.ds.sequence_parallel_size * config.ds.tensor_parallel_size if config.cluster.enable else 1
    return max(1, ranks(config) // width)
