"""The algorithm of an OpenRLHF command: advantages, KL, losses, critic, optimizers, schedules and corrections."""

from collections.abc import Mapping

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS
from rollgrad.entrypoints.openrlhf.draft import RLDraft
from rollgrad.entrypoints.openrlhf.shared import translate_optimizer, translate_schedule

CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("geometric", "mask")}
"""Level and mode of the types of correction of OpenRLHF's older releases."""

LEVELS = {"token": "token", "seq": "geometric"}
"""Our levels of OpenRLHF's."""

AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
"""Our aggregations of OpenRLHF's."""


def translate_algorithm(draft: RLDraft) -> None:
    """Sets `algo`, `critic`, and the actor's loss, optimizer and schedule.

    Raises:
        ConfigurationError: OpenRLHF has no such value.
    """
    _advantages(draft)
    _kl(draft)
    _policy_loss(draft)
    _critic(draft)
    translate_optimizer(draft, "actor")
    translate_schedule(draft, "actor")
    _correction(draft)


def _advantages(draft: RLDraft) -> None:
    for key in ("gamma", "lambd"):
        value = draft.value(f"algo.advantage.{key}", 1.0)
        if key in draft.traits.uses:
            draft.set(f"algo.advantage.{key}", value)
        elif value != 1:
            draft.lose(f"algo.advantage.{key}", f"{draft.estimator} does not use it, in OpenRLHF neither")
    if draft.value("algo.advantage.no_std_norm", False):
        if draft.traits.whiten == "none":
            draft.lose("algo.advantage.no_std_norm", f"{draft.estimator} does not whiten, in OpenRLHF neither")
        else:
            draft.set("algo.advantage.no_std_norm", True)
    _filtering(draft)


def _filtering(draft: RLDraft) -> None:
    if draft.value("algo.dynamic_filtering_enable", False):
        draft.set("algo.dynamic_filtering_enable", True)
        draft.set("algo.dynamic_filtering_range", draft.value("algo.dynamic_filtering_range", [0.0, 1.0]))
    else:
        draft.lose("algo.dynamic_filtering_range", "no group is filtered without --dynamic_filtering")


def _kl(draft: RLDraft) -> None:
    coef = draft.kl_coef
    draft.set("algo.kl.init_coef", coef)
    if coef == 0:
        for key in ("estimator", "use_loss", "unbiased_gradient", "target", "horizon"):
            draft.lose(f"algo.kl.{key}", "a KL weight of 0 turns KL off")
        return
    use_loss = draft.value("algo.kl.use_loss", False)
    estimator = draft.value("algo.kl.estimator", "k1")
    if draft.value("algo.kl.unbiased_gradient", False):
        if use_loss:  # the gradient of all three estimators is then that of rho k3
            estimator = "k3_unbiased"
        else:
            draft.lose("algo.kl.unbiased_gradient", "KL in the reward has no gradient, in OpenRLHF neither")
    elif use_loss and estimator == "k1":
        estimator = "k2"
        draft.change("algo.kl.use_loss", "the estimator becomes k2, for the gradient of k1 is zero on average")
    draft.set("algo.kl.use_loss", use_loss)
    draft.set("algo.kl.estimator", estimator)
    target = draft.value("algo.kl.target")
    if target is None:
        draft.lose("algo.kl.horizon", "the KL weight is fixed without --kl_target")
        return
    draft.set("algo.kl.target", target)
    horizon = draft.value("algo.kl.horizon", 10000.0)
    draft.set("algo.kl.horizon", horizon)
    if horizon < draft.value("rollout.batch_size", 1024) * draft.value("rollout.n_samples_per_prompt", 1):
        draft.change(
            "algo.kl.target",
            "the horizon is shorter than a rollout, after which the KL weight moves by a fifth at most",
        )


def _policy_loss(draft: RLDraft) -> None:
    loss = draft.value("actor.policy_loss_type", "ppo")
    draft.set("actor.policy_loss_type", loss)
    eps, eps_low_high = draft.value("actor.eps_clip", 0.2), draft.value("actor.eps_clip_low_high")
    if eps_low_high is not None:
        draft.set("actor.eps_clip_low_high", eps_low_high)
        draft.lose("actor.eps_clip", "--eps_clip_low_high replaces it")
    elif loss != "ppo" or eps != 0.2:  # OpenRLHF has one default for all losses
        draft.set("actor.eps_clip", eps)
    if loss == "ppo":
        draft.set("actor.dual_clip", draft.value("actor.dual_clip"))
        if "actor.loss_agg_mode" in draft.options:
            draft.set("actor.loss_aggregation", _one_of(draft, "actor.loss_agg_mode", AGGREGATIONS, "token-mean"))
    else:
        draft.lose("actor.loss_agg_mode", f"the {loss} loss is a mean over sequences, in OpenRLHF too")
        draft.lose("actor.dual_clip", f"the {loss} loss has no bound for negative advantages")
    beside = draft.value("actor.entropy_coef") or (draft.kl_coef and draft.value("algo.kl.use_loss", False))
    over_tokens = loss == "ppo" and draft.settings["actor"].get("loss_aggregation", "token_mean") == "token_mean"
    if beside and not over_tokens:
        draft.changed.append(
            "KL and entropy in the loss are means over replies, as the loss is, in OpenRLHF over tokens"
        )


def _critic(draft: RLDraft) -> None:
    if not draft.has_critic:
        for name in draft.options:
            shared = draft.options.get(name.replace("critic.", "actor.", 1)) is draft.options[name]
            if name.startswith("critic.") and FLAGS[name].reason is None and not shared:
                draft.lose(name, f"{draft.estimator} has no critic, in OpenRLHF neither")
        return
    for name, flag in FLAGS.items():
        if flag.to is not None and name in draft.options and name.startswith("critic."):
            draft.set(flag.to, draft.value(name))
    draft.set("critic.model_name_or_path", draft.value("critic.model_name_or_path", draft.reward_model))
    frozen_steps = draft.value("critic.freezing_steps", -1)
    if frozen_steps >= 0:
        draft.set("critic.freezing_steps", frozen_steps + 1)
        draft.change("critic.freezing_steps", f"{frozen_steps + 1} rollouts, since OpenRLHF counts from 0")
    translate_optimizer(draft, "critic")
    translate_schedule(draft, "critic")


def _one_of(draft: RLDraft, name: str, choices: Mapping[str, str], default: str) -> str:
    """Returns our word for the value of a flag.

    Raises:
        ConfigurationError: OpenRLHF has no such value.
    """
    value = draft.value(name, default)
    if value not in choices:
        given = draft.options[name]
        raise ConfigurationError(f"{given} is none of {', '.join(choices)}: change {given.flag}.")
    return choices[value]


def _correction(draft: RLDraft) -> None:
    """Translates the off-policy correction, whose level says since 0.11 whether there is one.

    Raises:
        ConfigurationError: OpenRLHF has no such value.
    """
    prefix = "algo.advantage.is_correction"
    keys = ("threshold", "type", "mode", "gating")
    if not draft.corrects:
        for key in keys:
            draft.lose(
                f"{prefix}_{key}",
                "no correction is made without --enable_vllm_is_correction, or a --algo.advantage.is_correction_level",
            )
        return
    if draft.value("actor.policy_loss_type", "ppo") != "ppo":  # the ratio itself is against the rollout's log-probs
        draft.set("algo.old_logprobs", "rollout")
        for key in keys:
            draft.lose(f"{prefix}_{key}", "gspo takes its ratio against the rollout instead, as in OpenRLHF")
        return
    gate = "ratio"
    if f"{prefix}_level" in draft.options:
        level = _one_of(draft, f"{prefix}_level", LEVELS, "token")
        mode = _one_of(draft, f"{prefix}_mode", {"mask": "mask", "clip": "clip"}, "mask")
        gate = _one_of(draft, f"{prefix}_gating", {key: key for key in ("ratio", "binary_kl", "tv")}, "ratio")
        draft.lose(f"{prefix}_type", f"--{prefix}_level, _mode and _gating say what is corrected")
    else:
        level, mode = CORRECTIONS[_one_of(draft, f"{prefix}_type", {kind: kind for kind in CORRECTIONS}, "tis")]
    bounds = draft.value(f"{prefix}_threshold", [0.5, 5.0])
    if len(bounds) == 1:
        mode = "truncate" if mode == "clip" else mode
        bounds = [0.0, *bounds]
    draft.set("algo.correction.level", level)
    draft.set("algo.correction.mode", mode)
    if gate != "ratio":
        if mode != "mask" or bounds[0] > 0:
            raise ConfigurationError(
                f"{prefix}_gating {gate} leaves out what is above one bound: set --{prefix}_mode mask, and one number "
                f"as --{prefix}_threshold."
            )
        draft.set("algo.correction.gate", gate)
        draft.set("algo.correction.threshold", bounds[1])
        return
    if level != "token" and mode != "mask":
        raise ConfigurationError(
            f"{prefix}_mode clip is of the level token, in OpenRLHF too: set --{prefix}_mode mask, or --{prefix}_level "
            "token."
        )
    if mode != "truncate":
        draft.set("algo.correction.low", bounds[0])
    draft.set("algo.correction.high", bounds[1])
