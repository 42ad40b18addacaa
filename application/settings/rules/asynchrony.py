"""Rules of asynchronous training. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.correction import learns_from_stale, truncated_sampling
from rollgrad.application.settings.run import RLConfig

FREE_STALENESS = 1
"""Updates of lag that are trained on without a correction: what one overlapping rollout has."""


def correction_fix(config: RLConfig) -> str:
    """The flags that let stale samples be corrected."""
    truncated = truncated_sampling(config)
    if truncated:
        return f"with {truncated} there is none, so set --rollout.top_p 1 and --rollout.top_k 0"
    return "set --algo.correction.level to auto, or --algo.old_logprobs to rollout"


def async_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of overlapping updates and rollouts."""
    train = config.train
    if not train.async_enable:
        return
    if train.max_staleness > FREE_STALENESS and not learns_from_stale(config):
        yield (
            f"train.max_staleness is {train.max_staleness}, and samples of policies more than {FREE_STALENESS} update "
            f"old need a correction: {correction_fix(config)}, or --train.max_staleness to 1."
        )
    groups, most = config.rollout.generate_batch_size, config.rollout.batch_size * (train.max_staleness + 1)
    if (groups or 0) > most:
        yield (
            f"rollout.generate_batch_size is {groups}, but with train.max_staleness {train.max_staleness} and "
            f"rollout.batch_size {config.rollout.batch_size} at most {most} groups are in flight: lower "
            "--rollout.generate_batch_size, or raise --train.max_staleness."
        )
