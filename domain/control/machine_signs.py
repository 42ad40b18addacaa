"""Signs that a run uses its machine badly, or is about to be killed: memory is full, engines compute the same tokens
again and again, or most of the time goes into something else than sampling and learning. Pure.
"""

from rollgrad.domain.control.rule import LearningSettings, Metrics, Rule, in_rollouts, in_steps

FULL_MEMORY = 0.97
"""Share of the memory in use from which on the next longer batch may end the run."""

SYNC_SHARE, TRAINER_IDLE_SHARE, GENERATION_IDLE_SHARE, SHORTEST_STEP = 0.3, 0.8, 0.5, 1.0
"""Shares of a step's time from which on most of it is lost: to the way of the weights, or to waiting of the trainer (as
rollouts take longer than updates, much of that is usual) or of the engines. In steps of less than a second, the last
number, such shares are chance."""

RECOMPUTED_SHARE = 0.5
"""Share of the tokens of earlier turns that engines compute again from which on most of their work is in vain."""


def _memory_full(metrics: Metrics, run: LearningSettings) -> bool | None:
    full = metrics.get("memory/host_share", 0.0) >= FULL_MEMORY
    return full or metrics.get("memory/gpu_retries", 0.0) > 0 or None


def _describe_memory_full(metrics: Metrics, run: LearningSettings, steps: int) -> tuple[str, str]:
    if metrics.get("memory/gpu_retries", 0.0) > 0:
        evidence = (
            f"The GPU's memory was full in {in_steps(steps)}: {metrics['memory/gpu_retries']:.0f} times in the last, "
            "memory had to be given back before there was room, which is slow, and a longer batch may end the run."
        )
        return evidence, "--train.max_tokens_per_micro_batch and --actor.gradient_checkpointing"
    evidence = (
        f"{metrics['memory/host_share']:.0%} of the machine's memory was in use in {in_steps(steps)}: the system may "
        "end the run."
    )
    return evidence, "other processes of the machine, and --rollout.max_concurrent"


def _lost_time(metrics: Metrics) -> tuple[str, float, str] | None:
    """Returns where most of a step's time is lost, its share, and the settings to look at."""
    step = metrics.get("time/step_s", 0.0)
    if step < SHORTEST_STEP:
        return None
    shares = (
        (
            "bringing the weights to the engines",
            metrics.get("time/sync_s", 0.0) / step,
            SYNC_SHARE,
            "--vllm.sync_backend",
        ),
        (
            "waiting of the trainer for rollouts",
            metrics.get("time/trainer_idle_share", 0.0),
            TRAINER_IDLE_SHARE,
            "--rollout.max_concurrent, and the number of engines against that of trainers",
        ),
        (
            "waiting of the engines for the trainer",
            metrics.get("time/generation_idle_share", 0.0),
            GENERATION_IDLE_SHARE,
            "--train.max_staleness, and the number of trainers against that of engines",
        ),
    )
    return next(((what, share, look_at) for what, share, most, look_at in shares if share >= most), None)


def _time_lost(metrics: Metrics, run: LearningSettings) -> str | None:
    lost = _lost_time(metrics)
    return None if lost is None else lost[0]


def _describe_time_lost(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    lost = _lost_time(metrics)
    assert lost is not None
    what, share, look_at = lost
    evidence = f"{share:.0%} of a step's {metrics['time/step_s']:.3g} s went into {what} in {in_rollouts(rollouts)}."
    return evidence, look_at


def _recomputing(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("rollout/recomputed_share", 0.0) >= RECOMPUTED_SHARE or None


def _describe_recomputing(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"Engines computed {metrics['rollout/recomputed_share']:.0%} of the tokens of earlier turns again in "
        f"{in_rollouts(rollouts)}: they have no memory for the keys and values of so many episodes."
    )
    return evidence, "--rollout.adaptive_concurrency true, a lower --rollout.max_concurrent, or more engines"


MACHINE_RULES = {
    "recomputing": Rule(sign=_recomputing, describe=_describe_recomputing),
    "memory_full": Rule(sign=_memory_full, describe=_describe_memory_full),
    "time_lost": Rule(sign=_time_lost, describe=_describe_time_lost),
}
