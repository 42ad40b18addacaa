"""The section `train`: how samples become optimizer steps, and how updates and rollouts share time."""

from enum import StrEnum

from attrs import define

from rollgrad.application.settings.sections.cluster import IN_CLUSTER
from rollgrad.domain.control.staleness import StalenessUnit, StalePolicy
from rollgrad.domain.settings import BELOW_ONE, COUNT, NOT_NEGATIVE, SEED, Condition, setting


class PartialRollout(StrEnum):
    """Treatment of replies in flight when the weights change."""

    NONE = "none"
    """They are finished first, under the weights that they began with."""
    KEEP = "keep"
    """They go on under the new weights, from the keys and values of the old ones; vLLM computes them anew for requests
    that it preempts for want of memory."""
    RECOMPUTE = "recompute"
    """They go on under the new weights, which compute the keys and values of their tokens anew."""


OVERLAPS = Condition(
    lambda here, run: here.async_enable, "rollouts and updates take turns", "turn on --train.async_enable"
)
MAY_BE_STALE = Condition(
    lambda here, run: here.max_staleness > 0,
    "with train.max_staleness 0 every sample is of the newest policy and nothing is in flight when weights change",
    "raise --train.max_staleness",
)
COLOCATED = Condition(
    lambda here, run: here.colocate_all,
    "models share no GPU with engines",
    "turn on --train.colocate_all",
)
ON_STEP = (
    "Python file, or module (my_lib.watch), with a function on_step(step, metrics, groups), or FILE:NAME. It is called"
    " after each step, returns metrics of its own or None, and may end the run by rollgrad.StopTraining. An async def "
    "on_step(step, metrics, groups, run) may ask the run for replies and evaluations."
)
"""Help of `on_step_path` of every trainer."""
WITH_EMA = Condition(lambda here, run: here.enable_ema, "no moving average is kept", "set --train.enable_ema")


@define(kw_only=True)
class TrainConfig:
    """Optimizer steps from samples."""

    agent_func_path: str | None = setting(
        None,
        "Python file, or module (my_lib.world), with a class Environment (reset, step, close), a function run_agent, "
        "or OpenRLHF's AgentExecutor; FILE:NAME takes one of another name. Episodes then have several turns, and "
        "rewards come from their steps.",
    )
    on_step_path: str | None = setting(None, ON_STEP)
    max_steps: int | None = setting(None, "Rollouts to train on; default: num_episodes passes over the prompts.", COUNT)
    num_episodes: int = setting(1, "Passes over the prompts when max_steps is not set.", COUNT)
    batch_size: int | None = setting(
        None,
        "Samples per optimizer step, each with all its branches; default: all of a rollout (strictly on-policy). "
        "Where failed episodes leave fewer samples than planned, steps become smaller, not fewer.",
        COUNT,
    )
    max_epochs: int = setting(1, "Passes over each rollout's samples.", COUNT)
    max_tokens_per_micro_batch: int = setting(
        16384, "Token budget of one forward and backward pass of a process, or of processes that share layers.", COUNT
    )
    max_tokens_per_scoring_pass: int | None = setting(
        None,
        "Token budget of one forward pass without gradients, for log-probs before the update, the reference and the "
        "critic; default: max_tokens_per_micro_batch.",
        COUNT,
    )
    seed: int = setting(42, "Seeds prompt order, sampling and shuffling.", SEED)
    profile_steps: int = setting(
        0,
        "Steps of which a Chrome trace of this process and of each process of a model or of vLLM is written to "
        "profile/ in output_dir, from the second on that is taken, also of a continued run; it makes them slower.",
        NOT_NEGATIVE,
    )
    async_enable: bool = setting(
        False, "Roll out while training, with a second copy of the weights; groups are trained on as they are finished."
    )
    max_staleness: int = setting(
        1,
        "Updates that may lie between the weights that began a sample and those that train on it, with async_enable. "
        "From 1 on samples are corrected for it (algo.correction.level); above 1 they have to be.",
        NOT_NEGATIVE,
        only_if=OVERLAPS,
    )
    stale_policy: StalePolicy = setting(
        StalePolicy.WAIT,
        "What happens when a slow group would become staler than max_staleness: training waits for it, or goes on and "
        "drops it.",
        only_if=(OVERLAPS, MAY_BE_STALE),
    )
    staleness_unit: StalenessUnit = setting(
        StalenessUnit.TRAJECTORY,
        "Beginning of a group's age: its start (trajectory), or its oldest sampled token (token).",
        only_if=(OVERLAPS, MAY_BE_STALE),
    )
    partial_rollout: PartialRollout = setting(
        PartialRollout.NONE,
        "What becomes of replies in flight when the weights change: they are finished first (none), or go on under "
        "the new weights with their old keys and values (keep) or with new ones (recompute).",
        only_if=(OVERLAPS, MAY_BE_STALE),
    )
    enable_ema: bool = setting(
        False,
        "Keep a moving average of the actor's weights, in the CPU's memory; every saved model has it in the "
        "directory ema.",
    )
    ema_beta: float = setting(0.992, "Its decay per optimizer step.", BELOW_ONE, only_if=WITH_EMA)
    colocate_all: bool = setting(
        False,
        "Let all models and engines share the same GPUs, with cluster.enable; engines sleep while models train. "
        "Without it each has its own.",
        only_if=IN_CLUSTER,
    )
    optimizer_sleeps: bool = setting(
        False,
        "Move what the optimizers of actor and critic keep (float32 weights, moments, buffers of gradients) to the "
        "CPU's memory while engines sample, with colocate_all; the weights that models compute with stay.",
        only_if=(IN_CLUSTER, COLOCATED),
    )
    colocate_actor_ref: bool = setting(
        False, "Let actor and reference share the same GPUs, with cluster.enable.", only_if=IN_CLUSTER
    )
    colocate_critic_reward: bool = setting(
        False, "Let critic and reward model share the same GPUs, with cluster.enable.", only_if=IN_CLUSTER
    )
