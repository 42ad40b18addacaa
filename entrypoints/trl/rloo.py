"""Translates what `trl rloo` has of its own: the leave-one-out baseline, KL in the reward, the ratio of sequences."""

from rollgrad.entrypoints.translation.draft import Draft
from rollgrad.entrypoints.trl.moving_reference import MOVING, follow_policy
from rollgrad.entrypoints.trl.rollouts import TRUNCATED, set_engines, set_groups, set_prompts, set_rewards


def finish_rloo(draft: Draft, *, dataset: str | None, samples: int) -> None:
    """Sets `data`, `rollout`, `reward`, `algo` and the loss of the actor.

    Args:
        draft: the translation.
        dataset: dataset of the prompts.
        samples: samples of an optimizer step.

    Raises:
        ConfigurationError: a rollout has no whole groups.
    """
    set_prompts(draft, dataset)
    set_groups(draft, samples)
    set_rewards(draft)
    set_engines(draft)
    draft.set("algo.advantage.estimator", "rloo_sequence")
    draft.set("actor.policy_loss_type", "sequence_ppo")
    draft.set("actor.loss_aggregation", "sequence_mean")
    low = draft.value("epsilon")
    draft.set("actor.eps_clip_low_high", [low, draft.value("epsilon_high", low)])
    if draft.value("mask_truncated_completions", False):
        draft.change("mask_truncated_completions", TRUNCATED)
    if draft.value("normalize_advantages", False):
        draft.set("algo.advantage.whiten", "batch")
        draft.change("normalize_advantages", "mean and deviation are over sampled tokens, in TRL over replies")
    beta = draft.value("beta")
    if beta:
        follow_policy(draft, "algo.kl")
        draft.set("algo.kl.init_coef", beta)
        draft.set("algo.kl.estimator", "k1")
    else:
        for name in MOVING:
            draft.lose(name, "there is no KL where --beta is 0, in TRL neither")
