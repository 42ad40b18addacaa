"""The algorithm of an OpenRLHF command: advantages, KL, losses, critic, optimizers, schedules and corrections."""

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS
from rollgrad.entrypoints.openrlhf.draft import RLDraft
from rollgrad.entrypoints.openrlhf.shared import translate_optimizer, translate_schedule

CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("geometric", "mask")}
"""Level and mode of OpenRLHF's types of correction."""


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
        for key in ("estimator", "use_loss", "target", "horizon"):
            draft.lose(f"algo.kl.{key}", "a KL weight of 0 turns KL off")
        return
    use_loss = draft.value("algo.kl.use_loss", False)
    estimator = draft.value("algo.kl.estimator", "k1")
    if use_loss and estimator == "k1":
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
    else:
        draft.lose("actor.dual_clip", f"the {loss} loss has no bound for negative advantages")


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


def _correction(draft: RLDraft) -> None:
    prefix = "algo.advantage.is_correction"
    if not draft.value(f"{prefix}_enable", False):
        for key in ("threshold", "type"):
            draft.lose(f"{prefix}_{key}", "no correction is made without --enable_vllm_is_correction")
        return
    if draft.value("actor.policy_loss_type", "ppo") != "ppo":  # the ratio itself is against the rollout's log-probs
        draft.set("algo.old_logprobs", "rollout")
        for key in ("threshold", "type"):
            draft.lose(f"{prefix}_{key}", "gspo takes its ratio against the rollout instead, as in OpenRLHF")
        return
    kind = draft.value(f"{prefix}_type", "tis")
    if kind not in CORRECTIONS:
        given = draft.options[f"{prefix}_type"]
        raise ConfigurationError(f"{given} is none of {', '.join(CORRECTIONS)}: change {given.flag}.")
    bounds = draft.value(f"{prefix}_threshold", [0.5, 5.0])
    level, mode = CORRECTIONS[kind]
    if len(bounds) == 1:
        mode = "truncate" if mode == "clip" else mode
        bounds = [0.0, *bounds]
    draft.set("algo.correction.level", level)
    draft.set("algo.correction.mode", mode)
    if mode != "truncate":
        draft.set("algo.correction.low", bounds[0])
    draft.set("algo.correction.high", bounds[1])
