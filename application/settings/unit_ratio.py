"""Tells when the ratio of a policy loss is 1 at every token, so that settings of the ratio do nothing, and when a loss
without a ratio would need one.

A rollout's only optimizer step starts from the policy that the ratio divides by (`algo.old_logprobs` recompute). The
losses are then the plain policy gradient, which is right, but not what someone expects who chose a loss for its ratio.
Later steps change a policy that did not sample: without a ratio their gradient is that of no objective.
"""

from rollgrad.application.settings.correction import may_be_stale
from rollgrad.application.settings.derived import optimizer_steps_per_rollout, samples_per_rollout
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, RouterReplay
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.domain.algorithms.catalogue import estimator_traits, policy_loss_traits
from rollgrad.domain.algorithms.settings import CorrectionGate, OldLogprobs

BY_RATIO = ("gmpo", "cispo", "sapo", "vespo", "topr", "kl_cov", "dppo_tv", "dppo_kl", "dro", "gspo", "gspo_token")
"""Losses that are chosen for what they do with ratios other than 1."""

OF_RATIOS = (
    *("eps_clip", "eps_clip_low_high", "dual_clip", "sapo_tau", "vespo_k", "vespo_lambda", "dro_beta"),
    "cov_kl_coef",
)
"""Settings of the actor that act on ratios other than 1 alone."""


def idle_settings(config: RLConfig) -> list[str]:
    """Returns the settings, with their values, that do nothing because an update has one optimizer step, which starts
    at the policy or critic that it is compared with; empty if it has several."""
    if optimizer_steps_per_rollout(config) > 1:
        return []
    idle: list[str] = []
    actor, default = config.actor, ActorConfig()
    # With dropout the passes of an update differ from those that score the policy before it.
    if config.algo.old_logprobs is OldLogprobs.RECOMPUTE and actor.lora.dropout == 0:
        changed = [key for key in OF_RATIOS if getattr(actor, key) != getattr(default, key)]
        chosen = ["policy_loss_type"] if actor.policy_loss_type in BY_RATIO else []
        # The trainer's experts are those of a pass that scores the policy before the update, which nothing else needs.
        kl, judged = config.algo.kl, config.algo.correction.gate is CorrectionGate.SECOND_MOMENT
        weighed = "collisions" in estimator_traits(config.algo.advantage.estimator).needs
        scored = judged or weighed or config.algo.top_entropy_quantile < 1
        unscored = not scored and (kl.init_coef == 0 or kl.use_loss)
        replays = ["router_replay"] if unscored and actor.router_replay is RouterReplay.TRAINER else []
        idle += [f"actor.{key} {getattr(actor, key)}" for key in (*chosen, *changed, *replays)]
    critic, usual = config.critic, CriticConfig()
    clips = "critic" in estimator_traits(config.algo.advantage.estimator).needs and critic.value_clip is not None
    if clips and critic.lora.dropout == 0 and critic.value_clip != usual.value_clip:
        idle.append(f"critic.value_clip {critic.value_clip}")
    return idle


def idle_sentence(config: RLConfig) -> str | None:
    """Returns a sentence about `idle_settings`, with what makes them act; None if there are none."""
    idle = idle_settings(config)
    if not idle:
        return None
    ways = [f"--train.batch_size below {samples_per_rollout(config)}", "--train.max_epochs above 1"]
    if may_be_stale(config):
        ways.append("--algo.old_logprobs rollout, by which older samples have a ratio")
    return (
        f"{', '.join(idle)}: without effect, because a rollout feeds one optimizer step, which starts from what the "
        f"update is compared with. Set {', '.join(ways[:-1])} or {ways[-1]}."
    )


def uncorrected_sentence(config: RLConfig) -> str | None:
    """Returns a sentence about optimizer steps after a rollout's first whose loss has no ratio, and what to set
    instead; None if there are none."""
    steps, loss = optimizer_steps_per_rollout(config), config.actor.policy_loss_type
    if steps < 2 or not policy_loss_traits(loss).on_policy:
        return None
    samples, train = samples_per_rollout(config), config.train
    ways = [f"--train.batch_size {samples}"] if (train.batch_size or samples) < samples else []
    ways += ["--train.max_epochs 1"] if train.max_epochs > 1 else []
    return (
        f"actor.policy_loss_type {loss} has no ratio, but a rollout feeds {steps} optimizer steps: all but the first "
        "take its samples for those of the policy that the steps before have made. Set "
        f"{' and '.join(ways)}, or --actor.policy_loss_type to a loss with a ratio, such as ppo."
    )


def log_ratios(config: RLConfig) -> None:
    """Warns at the start of a run of settings that do nothing, and of optimizer steps that nothing corrects."""
    import structlog

    log = structlog.get_logger(__name__)
    if (sentence := idle_sentence(config)) is not None:
        log.warning("settings without effect", settings=sentence)
    if (sentence := uncorrected_sentence(config)) is not None:
        log.warning("optimizer steps without a ratio", steps=sentence)
