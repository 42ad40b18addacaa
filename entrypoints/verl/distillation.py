"""Translates what a verl command learns from a teacher, which is the reference here."""

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_verl_commands import TEACHER, TEACHING
from rollgrad.entrypoints.verl.draft import DISTRIBUTIONS, TAIL, RLDraft

LOSS = f"{TEACHING}.distillation_loss"

ESTIMATORS = {"k3": "k3", "low_var_kl": "k3", "k2": "k2", "mse": "k2", "abs": "abs"}
"""verl's losses of the sampled tokens."""
RATIOS = ("k1", "kl")
"""Those that are no losses, for their gradient is one of the policy alone."""


def translate_distillation(draft: RLDraft) -> None:
    """Sets `ref` and `algo.kl`, or notes what is idle without a teacher.

    Raises:
        ConfigurationError: there is no teacher, or none that can be the reference, or no such loss.
    """
    if not draft.distils:
        for name, given in draft.options.items():
            idle = name.startswith(f"{TEACHING}.") and name != f"{TEACHING}.enabled" and not given.unset
            if idle and draft.program.flags[name].reason is None:  # flags with a reason are reported already
                draft.lose(name, "there is no teacher without distillation.enabled, in verl neither")
        return
    _teacher(draft)
    coef, in_loss = draft.kl
    draft.set("algo.kl.init_coef", coef)
    draft.set("algo.kl.use_loss", in_loss)
    _loss(draft)
    if not draft.rewarded:
        draft.lose("algorithm.adv_estimator", "the teacher alone teaches without use_task_rewards, in verl too")
        draft.lose(f"{LOSS}.distillation_loss_coef", "it weighs a teacher beside rewards, in verl too")
    if not draft.teaches_distributions:
        draft.lose(f"{LOSS}.topk", "the sampled tokens are compared, in verl too")
    for name in ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"):
        if draft.asks(name):
            draft.lose(name, "a run has one reference, which is the teacher")


def _teacher(draft: RLDraft) -> None:
    """Sets the reference."""
    others = sorted({name.split(".")[2] for name in draft.options if name.startswith(f"{TEACHING}.teacher_models.")})
    if others and others != ["teacher_model"]:
        raise ConfigurationError(
            f"The command has the teachers {', '.join(others)}, but several are on servers here: start one for each, "
            f"such as vllm serve, leave {TEACHING} out, and write --algo.preset on_policy_distill --ref.urls KEY "
            "http://host:8000 ..., with the data source of its prompts as KEY."
        )
    path = draft.value(TEACHER)
    if path is None:
        raise ConfigurationError(f"{TEACHING}.enabled is True, but there is no teacher: add {TEACHER}=MODEL.")
    draft.set("ref.model_name_or_path", path)


def _loss(draft: RLDraft) -> None:
    """Sets what the policy is held to the teacher by.

    Raises:
        ConfigurationError: there is no such loss.
    """
    mode = draft.one_of(f"{LOSS}.loss_mode", (*RATIOS, *ESTIMATORS, *DISTRIBUTIONS))
    if mode in RATIOS and not draft.by_policy_gradient:
        raise ConfigurationError(
            f"{LOSS}.loss_mode is {mode}, whose gradient does not depend on the teacher, in verl neither: add "
            f"{LOSS}.use_policy_gradient=True, or set it to k3."
        )
    if draft.teaches_distributions:
        draft.set("algo.kl.estimator", "full")
        draft.set("algo.kl.beta", 0.0)
        draft.set("algo.kl.top_k", draft.value(f"{LOSS}.topk"))
        if mode != TAIL:
            draft.change(f"{LOSS}.loss_mode", "all other tokens count as one more outcome, in verl not at all")
    elif not draft.rewarded:
        _advantages(draft, mode)
    elif draft.by_policy_gradient:
        draft.set("algo.kl.estimator", "k2")
        draft.change(
            f"{LOSS}.use_policy_gradient", "the teacher's term is the loss k2, which has that gradient, without a clip"
        )
    else:
        draft.set("algo.kl.estimator", ESTIMATORS[mode])
    clipped = draft.by_policy_gradient and not draft.rewarded
    for side in ("low", "high"):
        if not clipped:
            draft.lose(f"{LOSS}.clip_ratio_{side}", "the teacher's term is not clipped")


def _advantages(draft: RLDraft, mode: str) -> None:
    """Translates a teacher whose log-ratio is the only advantage."""
    if draft.by_policy_gradient:
        draft.set("actor.policy_loss_type", "ppo")
        draft.set("actor.eps_clip_low_high", [draft.value(f"{LOSS}.clip_ratio_{side}") for side in ("low", "high")])
    if mode not in (*RATIOS, "k2", "mse"):  # as a loss, k2 has that gradient
        draft.changed.append(
            f"{LOSS}.loss_mode {mode}: the advantage is minus the log-ratio, which is the gradient of k2"
        )
