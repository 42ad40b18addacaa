"""The algorithm of a verl command: advantages, KL, the loss, optimizers, schedules, adapters and corrections."""

from collections.abc import Mapping

from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES, canonical_policy_loss
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_verl_commands import IS, RS
from rollgrad.entrypoints.names.names_of_verl_seldom_set import ACTOR, MODEL
from rollgrad.entrypoints.verl.draft import RLDraft, VerlDraft

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant_length",
    "token-sum": "token_sum",
}
"""verl's ways from token losses to one number."""

OWN_AGGREGATION = ("gmpo", "sapo")
"""Losses that verl aggregates in one way, whatever is set: as they are here by default."""

OWN_MEASURE = ("gmpo", "dppo_kl")
"""Losses whose clip range is not one of ratios, so that a lower range above 1 is another than 1."""

LOSSES = {"gpg": "policy_gradient", "bypass_mode": "ppo", "gspo": "gspo_token"}
"""Losses of verl that have another name here. verl's `gspo` has the gradient of GSPO-token: each token has its own
advantage, and its own weight of a correction."""

KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "full": None}
"""verl's estimators of KL; None: there is none here."""

SCHEDULES = {"constant": "constant", "cosine": "cosine_with_min_lr"}
"""verl's learning rates over a run."""

COVARIANCES: Mapping[str, Mapping[str, str]] = {
    "clip_cov": {"clip_cov_ratio": "cov_share"},
    "kl_cov": {"kl_cov_ratio": "cov_share", "ppo_kl_coef": "cov_kl_coef"},
}
"""Settings of `policy_loss` that a loss reads, and the actor's here."""

LEVELS = {
    **{level: level for level in ("token", "sequence", "geometric")},
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
    "True": "token",  # as an older release has it
}
"""verl's scopes of the ratio of a correction, which it bounds itself; of others it bounds a divergence."""

REPLAYS = {"disabled": None, "R2": "trainer", "R3": "engine"}
"""verl's ways of replaying the experts of a rollout; None: they are not replayed."""

OTHERWISE: Mapping[str, str] = {
    "pass_at_k": "any samples of a group are compared, in verl the two best",
    "optimal_token_baseline": "what the longest reply has beyond all others takes the last baseline, in verl none, and "
    "weights of a correction do not enter it",
    "gpg": "advantages are divided by the share of groups whose rewards differ, in verl by that of rewards that are "
    "not 0",
    "gdpo": "the last normalisation is over replies, in verl over tokens, where KL in the reward has no effect",
}
"""Differences of estimators from verl's of the same name."""

BEYOND_OUTCOMES = ("optimal_token_baseline", "gdpo")
"""Estimators that compare samples of a group, but in verl not by the outcome with its penalties."""

POLICY_LOSS = f"{ACTOR}.policy_loss"

MAX_RATIO = 20
"""Ratio at which DPPO's weight of a token is truncated here, as the paper's authors advise a large one."""


def translate_algorithm(draft: RLDraft) -> None:
    """Sets `algo`, `critic`, and the actor's loss, optimizer and adapters.

    Raises:
        ConfigurationError: there is no such value.
    """
    _advantages(draft)
    _kl(draft)
    _policy_loss(draft)
    _critic(draft)
    translate_optimizer(draft, ACTOR, "actor")
    translate_adapters(draft, MODEL)
    _filtering(draft)
    _correction(draft)


def _advantages(draft: RLDraft) -> None:
    estimator, given = draft.estimator, draft.value("algorithm.adv_estimator")
    if estimator == "grpo_passk":
        estimator = "pass_at_k"
    if estimator in OTHERWISE:
        draft.change("algorithm.adv_estimator", OTHERWISE[estimator])
    if estimator not in ESTIMATORS:
        raise ConfigurationError(
            f"algorithm.adv_estimator is {given}, but there are {', '.join(ESTIMATORS)}: change it, or define it in "
            "the file of algo.extension_path."
        )
    if draft.penalises_rewards and "group" in ESTIMATORS[estimator].needs:
        if estimator == "rloo":
            estimator = "rloo_sequence"
        elif estimator not in BEYOND_OUTCOMES:
            draft.change(
                "algorithm.use_kl_in_reward",
                "penalties are taken off after a reward has been compared with its group, token by token, in verl "
                "before",
            )
    draft.set("algo.advantage.estimator", estimator)
    if draft.estimator not in ("group_norm", "dr_grpo"):
        why = f"{estimator} is not GRPO, in verl neither"
        if estimator == "pass_at_k":
            why = "pass_at_k always divides by the deviation"
        draft.lose("algorithm.norm_adv_by_std_in_grpo", why)
    for name, key in (("gamma", "gamma"), ("lam", "lambd"), ("gigpo.step_advantage_w", "step_weight")):
        value = draft.value(f"algorithm.{name}", 1.0)
        if key in ESTIMATORS[estimator].uses:
            draft.set(f"algo.advantage.{key}", value)
        elif value != 1:
            draft.lose(f"algorithm.{name}", f"{estimator} does not use it")


def _kl(draft: RLDraft) -> None:
    if draft.distils:
        return  # distillation is the run's only KL
    coef, in_loss = draft.kl
    if in_loss and draft.asks("algorithm.use_kl_in_reward"):
        draft.lose("algorithm.use_kl_in_reward", "KL is in the loss alone, for a run has one KL term")
    if coef == 0 or not in_loss:
        for key in ("coef", "type"):
            draft.lose(f"{ACTOR}.kl_loss_{key}", "there is no KL in the loss, in verl neither")
    if coef == 0 or in_loss:
        for name in ("kl_penalty", *(f"kl_ctrl.{key}" for key in ("kl_coef", "type", "horizon", "target_kl"))):
            draft.lose(f"algorithm.{name}", "there is no KL in the reward, in verl neither")
    if coef == 0:
        return
    draft.set("algo.kl.init_coef", coef)
    draft.set("algo.kl.use_loss", in_loss)
    draft.set("algo.kl.estimator", _kl_estimator(draft, in_loss))
    if not in_loss and draft.one_of("algorithm.kl_ctrl.type", ("fixed", "adaptive")) == "adaptive":
        draft.set("algo.kl.target", draft.value("algorithm.kl_ctrl.target_kl"))
        draft.set("algo.kl.horizon", draft.value("algorithm.kl_ctrl.horizon"))
    else:
        for key in ("horizon", "target_kl"):
            draft.lose(f"algorithm.kl_ctrl.{key}", "KL's weight is fixed, in verl too")


def _kl_estimator(draft: RLDraft, in_loss: bool) -> str:
    """Returns the estimator of KL, which has verl's gradient where it is in the loss."""
    name = f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty"
    kind = str(draft.value(name))
    ours = KL_KINDS.get(kind.removesuffix("+"))
    if ours is None:
        raise ConfigurationError(f"{name} is {kind}, but there are kl, abs, mse and low_var_kl: change it.")
    if in_loss and kind.endswith("+"):
        draft.change(name, "the estimator is k2, which has that gradient")
        return "k2"
    if in_loss and ours == "k1":
        draft.change(name, "the estimator becomes k2, for the gradient of k1 is zero on average")
        return "k2"
    return ours


def _policy_loss(draft: RLDraft) -> None:
    mode = str(draft.value(f"{POLICY_LOSS}.loss_mode"))
    loss = LOSSES.get(mode, canonical_policy_loss(mode))
    if loss not in POLICY_LOSSES:
        raise ConfigurationError(
            f"{POLICY_LOSS}.loss_mode is {mode}, but there are {', '.join(POLICY_LOSSES)}: change it, or define it in "
            "the file of algo.extension_path."
        )
    traits = POLICY_LOSSES[loss]
    draft.set("actor.policy_loss_type", loss)
    clip = draft.value(f"{ACTOR}.clip_ratio")
    low_high = [draft.value(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high")]
    if traits.clip is not None:  # verl has one default for all losses
        low, high = (clip if bound is None else bound for bound in low_high)
        if loss not in OWN_MEASURE:
            low = min(low, 1.0)  # a ratio is above 0: verl's CISPO writes 10 for no lower bound
        draft.set("actor.eps_clip_low_high", [low, high])
        if None not in low_high:
            draft.lose(
                f"{ACTOR}.clip_ratio", "clip_ratio_low and clip_ratio_high, 0.2 unless set, replace it, in verl too"
            )
    else:
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            draft.lose(f"{ACTOR}.{key}", f"the {loss} loss does not clip")
    bound = draft.value(f"{ACTOR}.clip_ratio_c")
    if "dual_clip" in traits.uses:
        draft.set("actor.dual_clip", bound)
    elif loss in ("dppo_tv", "dppo_kl"):
        if bound != MAX_RATIO:
            draft.changed.append(
                f"{loss}: ratios weigh up to {MAX_RATIO}, in verl up to clip_ratio_c, which is {bound}"
            )
    else:
        draft.lose(f"{ACTOR}.clip_ratio_c", f"the {loss} loss has no such bound here")
    _settings_of_losses(draft, loss)
    _aggregation(draft, loss)
    if (replay := REPLAYS[draft.one_of(f"{ACTOR}.router_replay.mode", tuple(REPLAYS))]) is not None:
        draft.set("actor.router_replay", replay)


def _settings_of_losses(draft: RLDraft, loss: str) -> None:
    """Translates what some losses alone read."""
    taus = (f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg")
    if loss == "sapo":
        draft.set("actor.sapo_tau", [draft.value(name) for name in taus])
    beta = draft.value(f"{POLICY_LOSS}.dro_beta")
    if loss == "dro" and beta is not None:
        draft.set("actor.dro_beta", beta)
    for name in (*(() if loss == "sapo" else taus), *(() if loss == "dro" else (f"{POLICY_LOSS}.dro_beta",))):
        draft.lose(name, f"the {loss} loss does not read it, in verl neither")
    bounds = (f"{POLICY_LOSS}.clip_cov_lb", f"{POLICY_LOSS}.clip_cov_ub")
    if loss == "clip_cov":
        draft.set("actor.cov_range", [draft.value(name) for name in bounds])
    else:
        for name in bounds:
            draft.lose(name, f"the {loss} loss does not read it, in verl neither")
    for owner, settings in COVARIANCES.items():
        for key, ours in settings.items():
            if loss == owner:
                draft.set(f"actor.{ours}", draft.value(f"{POLICY_LOSS}.{key}"))
            else:
                draft.lose(f"{POLICY_LOSS}.{key}", f"the {loss} loss does not read it, in verl neither")


def _aggregation(draft: RLDraft, loss: str) -> None:
    name, factor = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    mode = draft.one_of(name, tuple(AGGREGATIONS))
    if loss in OWN_AGGREGATION:
        draft.lose(name, f"the {loss} loss is a mean over replies, in verl too")
        if mode != "seq-mean-token-mean" and (draft.value(f"{ACTOR}.entropy_coeff") or all(draft.kl)):
            draft.changed.append(
                f"KL and entropy in the loss are means over replies, as the {loss} loss is, in verl by {name}"
            )
    else:
        draft.set("actor.loss_aggregation", AGGREGATIONS[mode])
    if draft.value(factor) != draft.value("data.max_response_length"):
        draft.lose(factor, "sums are divided by the longest reply, data.max_response_length")


def _critic(draft: RLDraft) -> None:
    if not draft.has_critic:
        for name in draft.options:
            if name.startswith("critic.") and draft.program.flags[name].reason is None and draft.asks(name):
                draft.lose(name, f"{draft.estimator} has no critic, in verl neither")
        if draft.asks("trainer.critic_warmup"):
            draft.lose("trainer.critic_warmup", f"{draft.estimator} has no critic, in verl neither")
        return
    translate_optimizer(draft, "critic", "critic")
    for key, ours in {"grad_clip": "max_norm", "cliprange_value": "value_clip"}.items():
        if f"critic.{key}" in draft.options:
            draft.set(f"critic.{ours}", draft.value(f"critic.{key}"))
    if draft.asks("critic.model.path"):
        draft.set("critic.model_name_or_path", draft.value("critic.model.path"))
    if warmup := draft.value("trainer.critic_warmup"):
        draft.set("critic.freezing_steps", max(0, warmup - 1))
        draft.change("trainer.critic_warmup", f"{max(0, warmup - 1)} rollouts, for verl counts the step that ends it")


def translate_optimizer(draft: VerlDraft, section: str, ours: str) -> None:
    """Sets optimizer and learning rate of a model of `ours`, whose settings are in verl's `section`.

    Raises:
        ConfigurationError: there is no such schedule.
    """
    optim = f"{section}.optim" if section else "optim"
    for key, default in {"lr": 1e-5 if ours == "critic" else None, "weight_decay": None, "betas": None}.items():
        value = draft.value(f"{optim}.{key}", default)
        if value is not None:
            draft.set(f"{ours}.adam.{key}", value)
    if draft.value(f"{optim}.optimizer", "AdamW") not in ("AdamW", "adam"):
        draft.lose(
            f"{optim}.optimizer", "the optimizer is AdamW with float32 master weights, or Muon: actor.optim muon"
        )
    name = next((key for key in ("lr_scheduler_type", "warmup_style") if draft.asks(f"{optim}.{key}")), None)
    kind = draft.value(f"{optim}.{name}") if name else draft.program.flags[f"{optim}.lr_scheduler_type"].default
    schedule = SCHEDULES.get(str(kind or "constant"))
    if schedule is None:
        schedule = "cosine_with_min_lr"
        draft.change(f"{optim}.{name}", "cosine_with_min_lr takes its place")
    draft.set(f"{ours}.lr_scheduler", schedule)
    if schedule == "constant":
        draft.lose(f"{optim}.min_lr_ratio", "a constant learning rate has no floor, in verl neither")
    else:
        draft.set(f"{ours}.min_lr_ratio", draft.value(f"{optim}.min_lr_ratio") or 0.0)
    share, steps = draft.value(f"{optim}.lr_warmup_steps_ratio"), draft.value(f"{optim}.lr_warmup_steps", -1) or -1
    total = draft.value("trainer.total_training_steps")
    if steps > 0 and total:
        share = steps / total
    elif steps > 0:
        draft.lose(
            f"{optim}.lr_warmup_steps",
            "a share of the steps is needed, lr_warmup_steps_ratio, where trainer.total_training_steps is not given",
        )
    draft.set(f"{ours}.lr_warmup_ratio", min(share or 0.0, 0.999))


def translate_adapters(draft: VerlDraft, section: str) -> None:
    """Sets `actor.lora`.

    Raises:
        ConfigurationError: a value is not of its kind.
    """
    given = {
        key: next((name for name in names if name in draft.options), None)
        for key, names in {
            "rank": (f"{section}.lora_rank", f"{section}.lora.rank"),
            "alpha": (f"{section}.lora_alpha", f"{section}.lora.alpha"),
            "target_modules": (f"{section}.target_modules", f"{section}.lora.target_modules"),
            "dropout": (f"{section}.lora.dropout",),
        }.items()
    }
    values = {key: draft.value(name) for key, name in given.items() if name is not None}
    if not values.get("rank"):
        for key, name in given.items():
            if name is not None and key != "rank" and values[key]:
                draft.lose(name, "all weights are trained without a rank")
        return
    name = given["target_modules"]
    if name is not None and any(module.startswith("linear_") for module in values["target_modules"] or ()):
        values["target_modules"] = ["all-linear"]
        draft.change(name, "all linear layers get adapters, for these are Megatron's names of them")
    draft.set("actor.lora.alpha", 32 if f"{section}.lora.rank" in draft.options else 16)  # verl's defaults
    for key, value in values.items():
        draft.set(f"actor.lora.{key}", value)


def _filtering(draft: RLDraft) -> None:
    group = "algorithm.filter_groups"
    if not draft.value(f"{group}.enable", False):
        for key in ("metric", "max_num_gen_batches"):
            draft.lose(f"{group}.{key}", "no group is filtered, in verl neither")
        return
    by_reward = str(draft.value(f"{group}.metric")) in ("reward", "seq_reward", "seq_final_reward")
    draft.set(f"algo.dynamic_filtering_{'spread' if by_reward else 'enable'}", True)
    most, prompts = draft.value(f"{group}.max_num_gen_batches"), draft.prompts
    if most and most > 0:
        each = draft.value("data.gen_batch_size") or prompts
        draft.set("algo.dynamic_filtering_budget", max(1.0, most * each / prompts))
    else:
        draft.change(f"{group}.max_num_gen_batches", "10 times the prompts of a rollout at most, in verl without end")


def _bounds(text: str) -> list[float]:
    """Returns the numbers of a threshold.

    >>> _bounds("0.5_2.0"), _bounds("2.0")
    ([0.5, 2.0], [2.0])
    """
    return [float(part) for part in str(text).replace(",", "_").split("_")]


def _correction(draft: RLDraft) -> None:
    """Translates the off-policy correction: weights (`rollout_is`), or masks (`rollout_rs`, and with two bounds
    `rollout_is`, which is then IcePop).

    Raises:
        ConfigurationError: there is no such level or threshold.
    """
    bypasses = draft.value("algorithm.rollout_correction.bypass_mode", False)
    bypasses, rejects = bypasses or draft.value(f"{POLICY_LOSS}.loss_mode") == "bypass_mode", draft.asks(RS)
    if bypasses:
        draft.set("algo.old_logprobs", "rollout")
        if not rejects:
            for name in (IS, f"{IS}_threshold", f"{RS}_threshold"):
                draft.lose(name, "the loss's own ratio is against the policy that sampled, in verl too")
            return
    name = RS if rejects else IS
    if not draft.asks(name):
        for lost in (f"{IS}_threshold", f"{RS}_threshold"):
            draft.lose(lost, "samples are not corrected, in verl neither")
        return
    try:
        ours, bounds = LEVELS[str(draft.value(name))], _bounds(draft.value(f"{name}_threshold") or "2.0")
        high, low = bounds[-1], bounds[0] if len(bounds) > 1 else 1 / bounds[-1]
        if str(draft.value(name)).endswith("_k1"):  # whose bounds are those of the inverse ratio
            low, high = 1 / high, 1 / low
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise ConfigurationError(
            f"{draft.options[name]} with {name}_threshold {draft.value(f'{name}_threshold')} has no counterpart: write "
            "algo.correction.level, mode, low and high instead."
        ) from error
    draft.set("algo.correction.level", ours)
    draft.set("algo.correction.high", high)
    if rejects:
        draft.lose(IS, "what is within the bounds weighs by its ratio, what is outside is masked")
        draft.lose(f"{IS}_threshold", "the bounds are those of rollout_rs_threshold")
        if not bypasses and not draft.asks(IS):
            draft.change(RS, "a token that is kept weighs by its ratio, in verl by 1")
    else:
        draft.lose(f"{RS}_threshold", "nothing is masked without rollout_rs, in verl neither")
    if not rejects and len(bounds) == 1:
        draft.set("algo.correction.mode", "truncate")
        return
    draft.set("algo.correction.mode", "mask")
    draft.set("algo.correction.low", low)
    if not rejects and ours != "token":
        draft.change(IS, "a token that is kept weighs by its own ratio, in verl by the sequence's")
