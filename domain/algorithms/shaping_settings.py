"""Settings of the shaping of rewards. Importable without torch."""

from enum import StrEnum

from attrs import define

from rollgrad.domain.settings import COUNT, INTERVAL, NOT_NEGATIVE, POSITIVE, Condition, Range, setting


class Normalise(StrEnum):
    """Source of the mean and deviation by which rewards are centred and scaled before any baseline."""

    NONE = "none"
    RUNNING = "running"
    DATASET = "dataset"
    MODEL = "model"


WITH_LENGTH_PENALTY = Condition(
    lambda here, run: here.overlong_buffer_len is not None,
    "there is no length penalty",
    "set --{at}overlong_buffer_len",
)
BY_LENGTH = Condition(
    lambda here, run: here.cosine_length, "the reward does not go by length", "turn on --{at}cosine_length"
)


@define(kw_only=True)
class ShapingSettings:
    """Shaping of rewards before any baseline."""

    pass_threshold: float = setting(1.0, "A reply passes when its score reaches this.")
    clip_range: tuple[float, float] | None = setting(
        None,
        "The reward of a whole episode, summed over its turns, is clamped to this range before any baseline.",
        INTERVAL,
    )
    normalize: Normalise = setting(
        Normalise.NONE,
        "Centre and scale rewards: by the running mean and deviation of all so far, by those of a dataset, or those "
        "that the reward model's config.json names (mean and std, as OpenRLHF saves them).",
    )
    normalize_mean_std: tuple[float, float] | None = setting(
        None,
        "Mean and standard deviation of rewards over a dataset, for normalize dataset.",
        Range(lambda pair: pair[1] > 0, "a mean, and a standard deviation greater than 0"),
    )
    overlong_buffer_len: int | None = setting(
        None,
        "Last tokens before the limit over which a length penalty grows (DAPO); none turns it off. The limit is "
        "rollout.max_new_tokens, in episodes of several turns rollout.max_episode_tokens; sampled tokens count.",
        COUNT,
    )
    overlong_penalty_factor: float = setting(1.0, "Penalty at full length.", POSITIVE, only_if=WITH_LENGTH_PENALTY)
    group_length_coef: float = setting(
        0.0,
        "Weight of a reward for length within the group (Kimi k1.5): from 1/2 for a prompt's shortest reply to -1/2 "
        "for the longest, at most 0 for replies that did not pass; 0 turns it off.",
        NOT_NEGATIVE,
    )
    stop_properly_penalty_coef: float | None = setting(
        None,
        "What a truncated reply is worth at most: this share of its reward, or this reward if negative; none turns "
        "it off.",
        Range(lambda coef: coef <= 1, "at most 1"),
    )
    cosine_length: bool = setting(
        False,
        "Reward by outcome and length along half a cosine, in place of the reward itself; full length is the limit "
        "of overlong_buffer_len.",
    )
    cosine_passed: tuple[float, float] = setting(
        (2.0, 1.0), "Reward of a reply that passed, at no and at full length.", only_if=BY_LENGTH
    )
    cosine_failed: tuple[float, float] = setting(
        (-10.0, 0.0), "Reward of a reply that failed, at no and at full length.", only_if=BY_LENGTH
    )
    cosine_exceeded: float = setting(-10.0, "Reward of a reply that was cut off.", only_if=BY_LENGTH)
