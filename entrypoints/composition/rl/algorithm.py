"""Makes the objects of an algorithm from its settings."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve
from torch import Tensor

from rollgrad.application.foreign import foreign_code
from rollgrad.application.rollouts.sampler import SamplingPlan
from rollgrad.application.rollouts.voting import voted
from rollgrad.application.settings.correction import correction_level
from rollgrad.application.settings.derived import moves_reference
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.domain.algorithms.catalogue import estimator_traits, policy_loss_traits
from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.algorithms.filtering import GroupFilter
from rollgrad.domain.algorithms.losses.centering import ScoreCentering
from rollgrad.domain.algorithms.losses.contract import TOKEN_SELECTIONS
from rollgrad.domain.algorithms.losses.corrections import within_second_moment
from rollgrad.domain.algorithms.losses.high_entropy import high_entropy_tokens
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.algorithms.settings import (
    CorrectionGate,
    CorrectionLevel,
    CorrectionSettings,
    KLAgainst,
    KLEstimator,
    OldLogprobs,
)
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.control.entropy_weight import EntropyController
from rollgrad.domain.control.findings import LearningWatch
from rollgrad.domain.control.kl_weight import KLController
from rollgrad.domain.control.rule import LearningSettings
from rollgrad.domain.control.staleness import StalenessBound
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.errors import ConfigurationError, ForeignError
from rollgrad.domain.ports.models import PolicyObjective
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.entrypoints.composition.models import averaging, following
from rollgrad.entrypoints.composition.outputs import load_function


def make_aggregation(config: RLConfig) -> str:
    """Returns the aggregation of token losses: as set, or the loss's default."""
    return config.actor.loss_aggregation or policy_loss_traits(config.actor.policy_loss_type).aggregation


def make_objective(
    config: RLConfig, *, kl_coef: float, entropy_coef: float, version: int
) -> PolicyObjective[RolloutBatch]:
    """Returns the policy's loss for the current weights of its terms."""
    return PolicyLossObjective(
        loss=config.actor.policy_loss_type,
        params=config.actor,
        settings=getattr(config.algo.losses, config.actor.policy_loss_type, None),
        correction=make_correction(config),
        bypass=config.algo.old_logprobs is OldLogprobs.ROLLOUT,
        kl_coef=kl_coef if config.algo.kl.use_loss else 0.0,
        kl_estimator=config.algo.kl.estimator,
        kl_against=config.algo.kl.against,
        entropy_coef=entropy_coef,
        positive_nll_coef=config.actor.positive_nll_coef,
        version=version if config.algo.old_logprobs is OldLogprobs.INTERPOLATE else None,
        centred=config.algo.score_centering_top_k > 0,
    )


def make_correction(config: RLConfig) -> CorrectionSettings | None:
    """Returns the off-policy correction, whose level is not auto; None without one."""
    level = correction_level(config)
    return None if level is CorrectionLevel.OFF else evolve(config.algo.correction, level=level)


def finds_collisions(config: RLConfig) -> bool:
    """Returns whether the policy's scores have collision entropies, which the estimator reads."""
    return "collisions" in estimator_traits(config.algo.advantage.estimator).needs


def make_centering(config: RLConfig) -> ScoreCentering | None:
    """Returns what finds the mean score that is taken out of the policy's; None without score centering."""
    return ScoreCentering(make_correction(config)) if config.algo.score_centering_top_k else None


def make_token_selection(config: RLConfig) -> Callable[[RolloutBatch], Tensor] | None:
    """Returns the function that chooses the tokens which the loss treats apart; None for losses that need none."""
    loss = config.actor.policy_loss_type
    select = TOKEN_SELECTIONS.get(loss)
    own = policy_loss_traits(loss).own(getattr(config.algo.losses, loss, None))
    return None if select is None else lambda batch: select(batch, config.actor, *own)


def make_token_filter(config: RLConfig) -> Callable[[RolloutBatch], Tensor] | None:
    """Returns the function that chooses the tokens of an optimizer step which the correction keeps; None where each
    token or sequence is judged by itself."""
    threshold = config.algo.correction.threshold
    if correction_level(config) is CorrectionLevel.OFF or not judges_steps(config):
        return None
    return lambda batch: within_second_moment(
        batch.filled("old_logprobs_N"), batch.rollout_logprobs_N, batch.action_mask_N, threshold
    )


def make_learned_tokens(config: RLConfig) -> Callable[[RolloutBatch], Tensor] | None:
    """Returns the function that chooses the tokens of an optimizer step at which the policy loss counts; None for
    all."""
    share = config.algo.top_entropy_quantile
    if share == 1:
        return None
    return lambda batch: high_entropy_tokens(batch.filled("entropies_N"), batch.action_mask_N, share)


def always_scores(config: RLConfig) -> bool:
    """Returns whether the policy's log-probs before the update are computed even where the ratio of the loss is 1:
    because those of the update's own passes are drawn with dropout, or a correction judges whole steps by them."""
    return bool(config.actor.lora.dropout) or judges_steps(config)


def judges_steps(config: RLConfig) -> bool:
    """Returns whether the off-policy correction compares all tokens of an optimizer step."""
    return config.algo.correction.gate is CorrectionGate.SECOND_MOMENT


def advantage_is_all(config: RLConfig) -> bool:
    """Returns whether a sample without an advantage has no gradient: the loss has no other term, and is in
    proportion."""
    actor = config.actor
    return (
        actor.entropy_coef == 0
        and actor.entropy_target is None
        and actor.positive_nll_coef == 0
        and actor.aux_loss_coef == actor.router_z_loss_coef == 0
        and not config.algo.kl.use_loss
        and policy_loss_traits(actor.policy_loss_type).proportional
    )


def load_group_filter(config: RLConfig) -> Callable[..., Any] | None:
    """Returns the function that `algo.dynamic_filtering_path` names; None where it names none. Where it fails, it
    raises a ForeignError.

    Raises:
        ConfigurationError: there is no such function, or it cannot be called with a group.
    """
    flag = "--algo.dynamic_filtering_path"
    function = load_function(config.algo.dynamic_filtering_path, "keep", flag=flag)
    if function is None:
        return None
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{flag} names a coroutine function, which nobody awaits: write def keep(group).")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigurationError(f"{flag}: the function cannot be called with a group ({error}).") from error

    def keeps(group: object) -> bool:
        with foreign_code(lambda words: ForeignError(f"{flag}: the function failed: {words}"), located=True):
            return bool(function(group))

    return keeps


def make_sampling_plan(config: RLConfig, keeps: Callable[..., Any] | None) -> SamplingPlan:
    """Returns the plan by which rollouts play groups, and keep those of which `keeps`, if there is one, is true."""
    algo, rollout, train = config.algo, config.rollout, config.train
    ahead = train.max_staleness + 1 if train.async_enable else 1
    return SamplingPlan(
        groups=rollout.batch_size,
        samples=rollout.n_samples_per_prompt,
        in_flight=rollout.generate_batch_size or rollout.batch_size * ahead,
        budget=algo.dynamic_filtering_budget,
        group_filter=GroupFilter(
            score_spread=algo.dynamic_filtering_enable and algo.dynamic_filtering_range is None,
            pass_threshold=config.reward.pass_threshold,
            score_range=algo.dynamic_filtering_range if algo.dynamic_filtering_enable else None,
            need_spread=algo.dynamic_filtering_spread,
            keeps=keeps,
        ),
        greedy_baseline="greedy_baseline" in estimator_traits(algo.advantage.estimator).needs,
        **({"judge": voted} if config.reward.majority_vote else {}),
    )


def make_staleness_bound(config: RLConfig, rollouts: int) -> StalenessBound:
    """Returns the bound on the staleness of an asynchronous run's groups."""
    train = config.train
    return StalenessBound(
        groups=config.rollout.batch_size,
        updates=rollouts,
        max_staleness=train.max_staleness,
        unit=train.staleness_unit,
        policy=train.stale_policy,
    )


def pipeline_kind(config: RLConfig) -> str:
    """Returns the kind of pipeline, by which rollouts and updates alternate or overlap."""
    return "overlapping" if config.train.async_enable else "alternating"


PAUSES = {
    PartialRollout.NONE: PauseMode.WAIT,
    PartialRollout.KEEP: PauseMode.KEEP,
    PartialRollout.RECOMPUTE: PauseMode.ABORT,
}
"""Treatment of requests in flight when an asynchronous run changes the weights."""


def make_kl_controller(config: RLConfig) -> KLController:
    """Returns the controller of the KL term's weight."""
    kl = config.algo.kl
    return KLController(coef=kl.init_coef, target=kl.target, horizon=kl.horizon)


def make_entropy_controller(config: RLConfig) -> EntropyController:
    """Returns the controller of the entropy term's weight."""
    actor = config.actor
    return EntropyController(coef=actor.entropy_coef, target=actor.entropy_target, step=actor.entropy_coef_step)


def make_curriculum(config: RLConfig) -> Curriculum | None:
    """Returns the curriculum, which skips prompts by their pass rate; None without one."""
    limits = config.data.curriculum_range
    return None if limits is None else Curriculum(limits=limits)


def reference_kind(config: RLConfig) -> str:
    """Returns the kind of reference model, or that there is none: one of its own, the policy with the average of its
    weights, or the one that the policy's scores are compared with."""
    kl = config.algo.kl
    if kl.init_coef == 0 or kl.against is not KLAgainst.REFERENCE:
        return "none"
    if config.ref.served:
        return "served"
    if moves_reference(config):
        return "averaged"
    return "compared" if teacher_kind(config) == "compared" else "loaded"


def teacher_kind(config: RLConfig) -> str:
    """Returns what updates compare the policy's distributions with: the reference itself, in the same process, or what
    it predicted before; or that they compare none."""
    kl = config.algo.kl
    if kl.init_coef == 0 or kl.against is not KLAgainst.REFERENCE or kl.estimator != KLEstimator.FULL:
        return "none"
    return "compared" if kl.top_k is None else "predicted"


def make_average(config: RLConfig) -> Mapping[str, Any]:
    """Returns the optimizer's settings of the moving average of the actor's weights: the reference, or one that is
    saved, or none."""
    kl = config.algo.kl
    if not moves_reference(config):
        return averaging(config.train)
    assert kl.ref_sync_steps is not None
    return following(kl.ref_sync_steps, kl.ref_mixup)


def critic_kind(config: RLConfig) -> str:
    """Returns the kind of critic, or that there is none."""
    return "loaded" if "critic" in estimator_traits(config.algo.advantage.estimator).needs else "none"


def make_learning_watch(config: RLConfig, rollouts: int) -> LearningWatch:
    """Returns a watch for reasons why the run cannot learn."""
    estimator = config.algo.advantage.estimator
    needs, kl = estimator_traits(estimator).needs, config.algo.kl
    return LearningWatch(
        LearningSettings(
            steps=rollouts,
            judged_by_outcome=not {"teacher", "states"} & {*needs} and not estimator.startswith(("turn_", "process_")),
            compared_in_groups="group" in needs or "greedy_baseline" in needs,
            pass_threshold=config.reward.pass_threshold,
            max_new_tokens=config.rollout.max_new_tokens,
            held_by_kl=kl.init_coef > 0 and kl.against is KLAgainst.REFERENCE and kl.teacher_template is None,
            kl_in_reward=not kl.use_loss,
        )
    )


def make_sampling(config: RLConfig) -> SamplingParams:
    """Returns the sampling settings of training episodes."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_strings=rollout.stop_strings,
        top_logprobs=config.algo.score_centering_top_k,
    )


def make_eval_sampling(config: RLConfig) -> SamplingParams:
    """Returns the sampling settings of held-out episodes."""
    return SamplingParams(
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        top_k=config.eval.top_k,
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        stop_strings=config.rollout.stop_strings,
    )
