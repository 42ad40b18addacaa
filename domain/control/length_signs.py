"""Signs in the lengths of replies. Pure."""

from rollgrad.domain.control.rule import LearningSettings, Metrics, Rule, in_rollouts

TRUNCATED_SHARE = 0.99
"""Share of truncated replies from which on the model seems not to end its replies by itself."""

LENGTH_CORRELATION, LENGTH_GROWTH = 0.8, 1.25
"""Correlation of reward and length within a rollout, and growth of the mean length over that of the first rollouts:
together they say that length is rewarded, while either alone is common in healthy runs."""
LENGTH_GAIN = 5.0
"""Least growth in tokens: replies of one token grow a quarter where an episode goes on while the model is right."""


def truncated(metrics: Metrics, run: LearningSettings) -> bool | None:
    """Returns whether (nearly) all replies of a rollout were cut off."""
    if run.one_token:
        return None  # the whole answer is one token: there is no room for its end
    return metrics.get("rollout/truncated_share", 0.0) >= TRUNCATED_SHARE or None


def _describe_truncated(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    """Returns what is said of it: of replies that ended at first, not that they need more room."""
    length, bounds = metrics["rollout/response_length_mean"], length_bounds(run)
    cut = f"{metrics['rollout/truncated_share']:.0%} of the replies of {in_rollouts(rollouts)} were cut off"
    if _has_grown(metrics):
        first = metrics["first/rollout/response_length_mean"]
        evidence = f"{cut} (mean length {length:.0f} tokens, {first:.0f} at first): the model has learned to go on."
        return evidence, f"the reward, which may grow with the length, and at --actor.adam.lr, before {bounds}"
    ends = "where that is room enough, at --data.chat_template and --rollout.stop_strings, by which replies end"
    evidence = f"{cut} (mean length {length:.0f} tokens): the model is not seen to end a reply."
    return evidence, f"{bounds}; {ends}"


def length_bounds(run: LearningSettings) -> str:
    """Returns the settings that bound a reply."""
    several = "--rollout.max_turns and --rollout.max_episode_tokens"
    return f"--rollout.max_new_tokens, which is {run.max_new_tokens} (in several turns also {several})"


def _follows_length(metrics: Metrics, run: LearningSettings) -> bool | None:
    related = metrics.get("rollout/reward_length_correlation", 0.0) >= LENGTH_CORRELATION
    return (run.judged_by_outcome and related and _has_grown(metrics)) or None


def _has_grown(metrics: Metrics) -> bool:
    length, first = metrics.get("rollout/response_length_mean"), metrics.get("first/rollout/response_length_mean")
    return length is not None and first is not None and length >= max(LENGTH_GROWTH * first, first + LENGTH_GAIN)


def _describe_follows_length(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"Longer replies had more reward in {in_rollouts(rollouts)} (correlation "
        f"{metrics['rollout/reward_length_correlation']:.2f}), and replies grew from "
        f"{metrics['first/rollout/response_length_mean']:.0f} to {metrics['rollout/response_length_mean']:.0f} tokens: "
        "the model may learn to write much."
    )
    return evidence, "the reward, and --reward.overlong_buffer_len"


LENGTH_RULES = {
    "truncated": Rule(sign=truncated, describe=_describe_truncated),
    "reward_follows_length": Rule(sign=_follows_length, describe=_describe_follows_length),
}
