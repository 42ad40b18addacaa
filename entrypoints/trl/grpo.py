"""Translates what `trl grpo` has of its own: KL, the correction, the loss and its normalisation."""

from collections.abc import Mapping
from typing import Any

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.translation.draft import Draft
from rollgrad.entrypoints.trl.moving_reference import MOVING, follow_policy
from rollgrad.entrypoints.trl.rollouts import TRUNCATED, set_engines, set_groups, set_prompts, set_rewards

LOSSES: Mapping[str, tuple[str, str | None]] = {
    "dapo": ("ppo", "token_mean"),
    "bnpo": ("ppo", "token_mean"),
    "grpo": ("ppo", "sequence_mean"),
    "dr_grpo": ("ppo", "constant_length"),
    "cispo": ("cispo", None),
    "luspo": ("ppo", "sequence_sum"),
    "sapo": ("sapo", None),
    "vespo": ("vespo", None),
}
"""TRL's losses: our loss, and how it is aggregated."""

PAIRS: Mapping[str, tuple[str, tuple[str, str]]] = {
    "actor.sapo_tau": ("sapo", ("sapo_temperature_pos", "sapo_temperature_neg")),
    "actor.vespo_k": ("vespo", ("vespo_k_pos", "vespo_k_neg")),
    "actor.vespo_lambda": ("vespo", ("vespo_lambda_pos", "vespo_lambda_neg")),
}
"""Settings of a loss for positive and negative advantages: the loss, and TRL's flags."""

SCALES = {
    "group": "group_norm",
    "true": "group_norm",
    "batch": "lite_ppo",
    "none": "dr_grpo",
    "false": "dr_grpo",
}
"""Estimators by TRL's scale of rewards."""

OVER_GENERATIONS = ("dapo", "cispo", "vespo")
"""Losses that TRL divides by the tokens of a generation."""

LEVELS = ("token", "sequence")
"""TRL's scopes of the loss's ratio."""

OF_CORRECTION = (
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
)
"""Flags that say how TRL corrects for the difference between vLLM's log-probs and the trainer's."""

UNCORRECTED = "samples are not corrected, for of less than the full distribution (--top_p, --top_k) no ratio is right"
"""The note on ratios that are left out."""

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""TRL's modes of it: the level, and what becomes of a ratio outside the bounds."""


def finish_grpo(draft: Draft, *, dataset: str | None, samples: int) -> None:
    """Sets `data`, `rollout`, `reward`, `algo` and the loss of the actor.

    Args:
        draft: the translation.
        dataset: dataset of the prompts.
        samples: samples of an optimizer step.

    Raises:
        ConfigurationError: there is no such loss or normalisation here.
    """
    set_prompts(draft, dataset)
    set_groups(draft, samples)
    set_rewards(draft)
    set_engines(draft)
    _kl(draft)
    _loss(draft)
    if not draft.value("use_vllm", False):
        for name in OF_CORRECTION:
            draft.lose(name, "vLLM does not sample without --use_vllm")
    _correction(draft)
    _note_means(draft, loss=draft.value("loss_type"), quantile=draft.value("top_entropy_quantile", 1.0))


def _note_means(draft: Draft, *, loss: str, quantile: float) -> None:
    """Notes where TRL's means and thresholds are of another set of tokens or replies than ours."""
    accumulated = draft.value("gradient_accumulation_steps")
    if loss == "bnpo" and accumulated > 1:
        draft.changed.append("the loss bnpo is the mean over the tokens of a step, in TRL of each micro-batch")
    if loss in OVER_GENERATIONS and draft.value("steps_per_generation", accumulated) > accumulated:
        draft.changed.append(
            f"the loss {loss} is divided by the tokens of its step, in TRL by their mean over the steps of a generation"
        )
    if draft.value("mask_truncated_completions", False) and loss not in OVER_GENERATIONS and loss != "bnpo":
        draft.change("mask_truncated_completions", TRUNCATED)
    if quantile < 1:
        draft.change(
            "top_entropy_quantile",
            "the threshold is that of a step's tokens under the policy before the update, in TRL of a micro-batch's "
            "under the policy in training",
        )
    if draft.value("entropy_coef", 0.0):
        draft.change("entropy_coef", "entropy is averaged as the loss is, in TRL over the tokens of a micro-batch")


def _kl(draft: Draft) -> None:
    beta = draft.value("beta")
    if not beta:
        for name in ("use_bias_correction_kl", *MOVING):
            draft.lose(name, "there is no KL without --beta, in TRL neither")
        return
    follow_policy(draft, "algo.kl")
    draft.set("algo.kl.init_coef", beta)
    draft.set("algo.kl.use_loss", True)
    unbiased = draft.value("use_bias_correction_kl")
    draft.set("algo.kl.estimator", "k3_unbiased" if unbiased else "k3")
    if unbiased and draft.value("importance_sampling_level") == "sequence":
        draft.change("beta", "the KL of a token is weighed by its own ratio, in TRL by that of the reply")


def _correction(draft: Draft) -> None:
    """Translates the off-policy correction: a mask of negative replies, or vLLM's ratio within bounds.

    Raises:
        ConfigurationError: there is no such mode.
    """
    threshold, mode = draft.value("off_policy_mask_threshold"), draft.value("vllm_importance_sampling_mode")
    corrects = draft.value("use_vllm", False) and draft.value("vllm_importance_sampling_correction")
    # The ratio of vespo is itself against the probabilities of vLLM.
    corrects = corrects and draft.value("loss_type") != "vespo"
    if corrects and mode not in CORRECTIONS:
        raise ConfigurationError(
            f"--vllm_importance_sampling_mode is {mode}, but there are {', '.join(CORRECTIONS)}: change it."
        )
    if (threshold is not None or corrects) and _truncated(draft):
        draft.changed.append(UNCORRECTED)
    elif threshold is not None:
        draft.set("algo.old_logprobs", "rollout")
        _set_correction(draft, level="sequence", mode="mask", gate="opsm", threshold=threshold)
        if corrects:
            draft.change("off_policy_mask_threshold", "ratios are against vLLM's log-probs, which nothing else bounds")
    elif corrects:
        level, _, kind = mode.partition("_")
        low = draft.value("vllm_importance_sampling_clip_min")
        high = draft.value("vllm_importance_sampling_cap", draft.value("vllm_importance_sampling_clip_max"))
        if kind == "mask":
            _set_correction(draft, level=level, mode="mask", low=low or 0.0, high=high)
        elif low is None:
            _set_correction(draft, level=level, mode="truncate", high=high)
        else:
            _set_correction(draft, level=level, mode="clip", low=low, high=high)
        if mode == "sequence_mask":
            draft.changed.append(
                "tokens of a reply whose ratio to vLLM is within bounds weigh by their own ratio, in TRL by the reply's"
            )


def _truncated(draft: Draft) -> bool:
    """Returns whether replies are sampled from less than the full distribution."""
    return bool(draft.value("top_p", 1.0) < 1 or draft.value("top_k", 0) > 0)


def _set_correction(draft: Draft, **settings: Any) -> None:
    for key, value in settings.items():
        draft.set(f"algo.correction.{key}", value)


def _loss(draft: Draft) -> None:
    scale = str(draft.value("scale_rewards")).lower()
    loss, aggregation = _loss_of(draft)
    if scale not in SCALES:
        raise ConfigurationError(
            f"--scale_rewards is {scale}, but there are group, batch and none: change --scale_rewards."
        )
    draft.set("algo.advantage.estimator", SCALES[scale])
    draft.set("actor.policy_loss_type", loss)
    if aggregation is not None:
        draft.set("actor.loss_aggregation", aggregation)
    _bounds(draft, loss)
    for setting, (owner, flags) in PAIRS.items():
        if loss == owner:
            draft.set(setting, [draft.value(flag) for flag in flags])
        else:
            for flag in flags:
                draft.lose(flag, f"it is of --loss_type {owner}, in TRL too")
    if loss == "vespo" and draft.value("use_vllm", False) and _truncated(draft):
        draft.changed.append(UNCORRECTED)
    elif loss == "vespo" and draft.value("use_vllm", False):
        draft.set("algo.old_logprobs", "rollout")
        draft.change(
            "loss_type", "vespo's ratios are against vLLM's log-probs as they are, in TRL bounded token by token"
        )


def _loss_of(draft: Draft) -> tuple[str, str | None]:
    """Returns the policy loss and its aggregation, None for the loss's own."""
    kind, level = draft.value("loss_type"), draft.value("importance_sampling_level")
    if kind not in LOSSES:
        raise ConfigurationError(f"--loss_type is {kind}, but there are {', '.join(LOSSES)}: change --loss_type.")
    if level not in LEVELS:
        raise ConfigurationError(
            f"--importance_sampling_level is {level}, but there are {' and '.join(LEVELS)}: change "
            "--importance_sampling_level."
        )
    loss, aggregation = LOSSES[kind]
    if level == "sequence":
        if loss != "ppo":
            raise ConfigurationError(
                f"--importance_sampling_level is sequence, which {loss} has not here: change --loss_type or "
                "--importance_sampling_level."
            )
        loss = "gspo"
    return loss, aggregation


def _bounds(draft: Draft, loss: str) -> None:
    """Sets the bounds of the ratio."""
    low = draft.value("epsilon")
    high = draft.value("epsilon_high", low)
    if loss == "cispo":  # TRL bounds the ratio by epsilon_high itself, not by 1 more
        draft.set("actor.eps_clip_low_high", [1.0, max(0.0, high - 1)])
        if high < 1:
            draft.changed.append(f"ratios are bounded by 1, in TRL with cispo by --epsilon_high, which is {high:g}")
    elif loss in ("ppo", "gspo"):
        draft.set("actor.eps_clip_low_high", [low, high])
    _delta(draft, loss, high)


def _delta(draft: Draft, loss: str, high: float) -> None:
    """Translates the bound on ratios of negative advantages, of a `loss` of ours with the upper clip range `high`."""
    delta = draft.value("delta")
    if loss == "gspo":
        draft.lose("delta", "a ratio of sequences has no bound of its own for negative advantages here")
    elif loss != "ppo":
        draft.lose("delta", f"the {loss} loss does not read it, in TRL neither")
    elif delta is not None:
        draft.set("actor.dual_clip", delta)
        if delta < 1 + high:
            draft.change("delta", "it bounds the ratio of negative advantages alone, in TRL of positive ones too")
