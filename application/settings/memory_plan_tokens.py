"""Tokens of one pass of a process at most, as `application.learning.microbatch` divides a batch: arithmetic only.

Does not own: what a token holds (`memory_plan_passes.py`).
"""

import math

from attrs import frozen

from rollgrad.application.settings.derived import longest_sample, ranks, samples_per_rollout
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.run import RLConfig

REPEATS = 4
"""Tokens of a pass with repeats, as a multiple of its budget at most (`domain.batches.partition`)."""


@frozen(kw_only=True)
class PassTokens:
    """`distinct` tokens are computed, of what sequences begin with alike one copy; `repeated` ones come on top where
    each sequence has keys and values of its own of what it shares."""

    distinct: int
    repeated: int


def pass_tokens(
    config: RLConfig,
    shape: ModelShape,
    parts: float,
    budget: int | None = None,
    *,
    trained: bool = False,
    told: int = 0,
) -> PassTokens:
    """Returns the tokens that one process passes over at a time: one of `parts` parts of a micro-batch, and at least
    its part of the longest sequence. The size of a micro-batch goes by the actor's processes, or by groups of them that
    share layers.

    Args:
        config: settings of the run.
        shape: shape of the model, which computes a shared prompt once unless it is computed padded.
        parts: processes of the model, or groups of those that share layers.
        budget: tokens; None is that of a micro-batch.
        trained: whether passes are over one optimizer step's samples, not over all.
        told: tokens that each prompt may have more, which samples may not share.
    """
    size, longest = config.ds.sequence_parallel_size, longest_sample(config) + told
    most = (budget or config.train.max_tokens_per_micro_batch) * ranks(config) / config.ds.tensor_parallel_size / parts
    shares, packed = max(1, parts / size), shape.passes is not None and not shape.passes.padded
    samples, groups = _step_samples(config) if trained else samples_per_rollout(config), config.rollout.batch_size
    plays = config.agent.plays or config.train.agent_func_path is not None
    bounds = [most]
    if not plays:  # a sample of an agent that writes its history anew has several sequences
        bounds.append(math.ceil(samples / shares) * longest / size)
    if not plays and packed and not told:  # all samples of a prompt begin with it
        bounds.append(math.ceil(groups / shares) * group_tokens(config) / size)
    distinct = math.ceil(max(longest / size, min(bounds)))
    if not packed:  # the formula of a model that was not measured has room for repeats
        return PassTokens(distinct=distinct, repeated=0)
    together = [REPEATS * most]
    if not plays:
        together += [samples * longest / size, config.rollout.n_samples_per_prompt * distinct]
    return PassTokens(distinct=distinct, repeated=max(0, math.ceil(min(together)) - distinct))


def group_tokens(config: RLConfig) -> int:
    """Returns the tokens of a prompt and the replies to it at most, the prompt counted once; where the two share a
    budget, replies to a shorter prompt may have more."""
    samples, reply = config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens
    longest = longest_sample(config)
    prompt = max(0, min(config.data.prompt_limit, longest - reply))
    return prompt + samples * min(reply, longest - prompt)


def _step_samples(config: RLConfig) -> int:
    """Returns the samples of the largest optimizer step."""
    samples = samples_per_rollout(config)
    return math.ceil(samples / math.ceil(samples / (config.train.batch_size or samples)))
