"""Experience: makes a batch with advantages from trajectories."""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.application.learning.advantage_metrics import advantage_metrics
from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.teacher_prompts import TeacherPrompts
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.domain.algorithms import shaping
from rollgrad.domain.algorithms.catalogue import estimator_traits
from rollgrad.domain.algorithms.estimators import EstimatorInput, estimate
from rollgrad.domain.algorithms.evaluation import MOST_SETS
from rollgrad.domain.algorithms.losses.kl import kl_estimate
from rollgrad.domain.algorithms.settings import KLEstimator, OldLogprobs
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.domain.batches.packed import Batch, PackedBatch, RolloutBatch, pack
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.batches.teaching import as_taught
from rollgrad.domain.batches.turn_states import TurnStates
from rollgrad.domain.control.signs import PART
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError, RewardError
from rollgrad.domain.ports.models import PolicyModel, PredictingModel, ReferenceModel, TokenScores, ValueModel

log = structlog.get_logger(__name__)

PARTS_SLACK = 1e-4
"""Relative difference between a reward and the weighted sum of its parts that rounding explains."""


@frozen(kw_only=True, eq=False)
class Experience:
    """A batch with advantages, and its metrics; `reference_kl` is the KL in the reward, in nats per token, None if it
    has none."""

    batch: RolloutBatch
    metrics: dict[str, float]
    reference_kl: float | None = None


class ExperienceService:
    """Scores trajectories under the policies involved and estimates advantages.

    Args:
        policy: the policy before its update.
        reference: None without a KL term.
        critic: None unless the estimator needs one.
        algo: algorithm settings.
        reward: settings of reward shaping.
        max_length: largest number of sampled tokens of an episode, for penalties of length; None without a limit.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
        steps_per_rollout: optimizer steps that one rollout feeds; with 1 the ratio is exactly 1 and the policy's
            log-probs before the update need not be computed for it.
        always_scores: whether they are computed for it all the same, because an update's own are drawn with dropout, or
            a correction is judged by them.
        replays: whether the engine should say to which experts it sent tokens; the first rollout of which nobody has
            said so is named.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        reference: ReferenceModel | None,
        critic: ValueModel | None,
        algo: AlgoConfig,
        reward: RewardConfig,
        max_length: int | None,
        max_tokens: int,
        steps_per_rollout: int,
        shares: int = 1,
        always_scores: bool = False,
        replays: bool = False,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._algo = algo
        self._reward = reward
        self._max_length = max_length
        self._moments: dict[str, shaping.RunningMoments] = {}
        self._max_tokens = max_tokens
        self._shares = shares
        self._ratio_is_one = steps_per_rollout == 1 and not always_scores
        self._replays = replays

    def make(
        self,
        trajectories: Sequence[Trajectory],
        kl_coef: float,
        baselines: Mapping[int, float] | None = None,
        teacher_prompts: TeacherPrompts | None = None,
        datasources: Mapping[int, str] | None = None,
    ) -> Experience:
        """Packs and scores trajectories, and estimates advantages. `kl_coef` is the controller's current weight,
        `baselines` are the rewards of greedy rollouts by group id, which are normalised and clipped like the others.
        `teacher_prompts` are the tokens that the reference reads in the place of prompts, of each rollout that it
        teaches; without any it reads what the policy reads, and teaches all. `datasources` are where prompts are from,
        by group id: a reference may ask.

        Raises:
            DataError: there are none, though the reference is to be told more; or no reference knows a datasource.
            EngineError: score centering lacks what it reads of the sampler.
        """
        metrics: dict[str, float] = {}
        batch = self._shaped(pack(trajectories), metrics)
        if teacher_prompts is not None:
            batch = _told(batch, trajectories, teacher_prompts)
            if batch.taught_S is not None:
                metrics["policy/taught_share"] = float(batch.taught_S.float().mean())
        elif self._algo.kl.teacher_template is not None:
            raise DataError(
                "algo.kl.teacher_template is set, but no prompt of this rollout says what the reference reads: prompts "
                "of your own have it as `teacher_token_ids`; else leave --algo.kl.teacher_template out."
            )
        if self._replays and batch.experts_NLK is None:
            log.warning(
                "actor.router_replay is engine, but of no token of this rollout is known to which experts it was sent: "
                "they go where the routers send them now"
            )
            self._replays = False
        batch = self._with_sampler(batch)
        batch = evolve(batch, baselines_S=self._baselines(trajectories, baselines or {}))
        batch, own = self._with_own_scores(batch)
        reference_kl: float | None = None
        token_rewards_N = torch.zeros(1).expand(batch.token_count)  # no memory
        if self._reference is not None:
            if datasources is not None:
                batch = evolve(batch, datasources_S=tuple(datasources[t.group_id] for t in trajectories))
            batch = self._with_reference(batch, self._reference)
            if not self._algo.kl.use_loss:
                token_rewards_N, found = self._kl_penalty(batch, kl_coef)
                reference_kl = found["policy/ref_kl"]
                metrics |= found
            batch = evolve(batch, datasources_S=())
        if self._critic is not None:
            batch = evolve(
                batch, values_N=self._critic.all_values(self._passes(batch.for_other_models(), self._critic))
            )
        states: TurnStates | None = None
        if "states" in estimator_traits(self._algo.advantage.estimator).needs:
            states = TurnStates.of(trajectories)
            metrics["advantage/same_state_share"] = states.shared_share
        batch = self._with_advantages(batch, token_rewards_N, states, own, metrics)
        return Experience(batch=batch, metrics=metrics, reference_kl=reference_kl)

    def _with_reference(self, batch: RolloutBatch, reference: ReferenceModel) -> RolloutBatch:
        """Adds what the reference finds at action tokens, after what it reads in the place of the prompts: their
        log-probs or, for the full estimator, the tokens that it finds most likely there.

        Raises:
            ConfigurationError: the reference, which the caller brought, finds no likely tokens.
        """
        taught, kl = as_taught(batch.for_other_models()), self._algo.kl
        passes, batch = self._passes(taught, reference), evolve(batch, teacher_prompts_S=())
        if kl.estimator != KLEstimator.FULL:
            return evolve(batch, ref_logprobs_N=_moved(reference.logprobs(passes), taught, batch))
        if not isinstance(reference, PredictingModel) or kl.top_k is None:
            raise ConfigurationError(
                f"algo.kl.estimator is full, but the reference that was given, a {type(reference).__name__}, is no "
                "PredictingModel (rollgrad.domain.ports.models), or algo.kl.top_k is not set: set --algo.kl.top_k and "
                "give it the methods `predict` and `predictions`, or set --algo.kl.estimator to k2 or k3."
            )
        found = reference.predictions(passes, kl.top_k)
        return evolve(
            batch,
            teacher_ids_NK=_moved(found.ids_AK, taught, batch),
            teacher_logprobs_NK=_moved(found.logprobs_AB, taught, batch),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the running moments of each role's rewards."""
        return {role: moments.state_dict() for role, moments in self._moments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        of_all = isinstance(state.get("count"), int | float)  # in states before roles had their own; also a role's name
        by_role = {"": state} if of_all else state
        self._moments = {role: shaping.RunningMoments.from_state_dict(moments) for role, moments in by_role.items()}

    def _shaped(self, batch: RolloutBatch, metrics: dict[str, float]) -> RolloutBatch:
        """Shapes rewards: by length and truncation, then normalised, then clipped."""
        reward = self._reward
        if reward.cosine_length:
            assert self._max_length is not None
            shaped_N = shaping.cosine_length(batch, reward, limit=self._max_length)
            batch = evolve(batch, rewards_N=shaped_N)
        if reward.overlong_buffer_len is not None:
            assert self._max_length is not None
            shaped_N = shaping.overlong_penalty(
                batch,
                limit=self._max_length,
                buffer=reward.overlong_buffer_len,
                factor=reward.overlong_penalty_factor,
            )
            batch = evolve(batch, rewards_N=shaped_N)
        if reward.group_length_coef:
            shaped_N = shaping.group_length(batch, coef=reward.group_length_coef, pass_threshold=reward.pass_threshold)
            batch = evolve(batch, rewards_N=shaped_N)
        if reward.stop_properly_penalty_coef is not None:
            batch = evolve(batch, rewards_N=shaping.stop_properly(batch, reward.stop_properly_penalty_coef))
        if reward.normalize is Normalise.RUNNING:
            shaped_N, self._moments = shaping.normalise_running(batch, self._moments)
            batch = evolve(batch, rewards_N=shaped_N)
        elif reward.normalize_mean_std is not None:
            mean, std = reward.normalize_mean_std
            batch = evolve(batch, rewards_N=shaping.normalise(batch, mean=mean, std=std))
        if reward.clip_range is not None:
            batch = evolve(batch, rewards_N=shaping.clip_outcomes(batch, reward.clip_range))
        metrics["reward/shaped_mean"] = float(shaping.outcomes(batch).mean())
        return batch

    def _with_sampler(self, batch: RolloutBatch) -> RolloutBatch:
        """Leaves out what score centering would read, where it is off: a client may have asked for likely tokens.

        Raises:
            EngineError: it is on, but of no token of the rollout is known which were the likeliest.
        """
        top_k = self._algo.score_centering_top_k
        if top_k and batch.sampler_ids_NK is None:
            raise EngineError(
                f"algo.score_centering_top_k is {top_k}, but of no token of this rollout is known which ones were "
                "likely in its place: an engine or agent of your own gives them as `top_logprobs` of a `Generation`; "
                "else set --algo.score_centering_top_k 0."
            )
        return batch if top_k else batch.without_sampler()

    def _baselines(self, trajectories: Sequence[Trajectory], baselines: Mapping[int, float]) -> Tensor | None:
        if not baselines:
            return None
        baselines_S = torch.tensor([baselines[t.group_id] for t in trajectories])
        reward = self._reward
        mean, std = reward.normalize_mean_std or (0.0, 1.0)
        if reward.normalize is Normalise.RUNNING:
            mean, std = self._moments[""].mean, self._moments[""].std  # greedy baselines refuse roles
        baselines_S = (baselines_S - mean) / std
        return baselines_S if reward.clip_range is None else baselines_S.clamp(*reward.clip_range)

    def _with_own_scores(self, batch: RolloutBatch) -> tuple[RolloutBatch, TokenScores | None]:
        """Adds what is read of the policy before the update: `old_logprobs_N` if the ratio or the KL penalty needs it,
        `entropies_N` if the loss chooses tokens by them. Returns its scores, too, None where nobody reads them."""
        source = self._algo.old_logprobs
        if source is OldLogprobs.ROLLOUT:
            batch = evolve(batch, old_logprobs_N=batch.rollout_logprobs_N)
        penalised = self._reference is not None and not self._algo.kl.use_loss
        known = source is OldLogprobs.INTERPOLATE or self._ratio_is_one
        compared = source is not OldLogprobs.ROLLOUT and (penalised or not known)
        chosen = self._algo.top_entropy_quantile < 1
        weighed = "collisions" in estimator_traits(self._algo.advantage.estimator).needs
        if not compared and not chosen and not weighed:
            return batch, None
        scores = self._policy.scores(self._passes(batch.without_sampler(), self._policy))
        batch = evolve(
            batch,
            old_logprobs_N=scores.logprobs_N if compared else batch.old_logprobs_N,
            entropies_N=scores.entropy_N if chosen else None,
            experts_NLK=batch.experts_NLK if scores.experts_NLK is None else scores.experts_NLK,
        )
        return batch, scores

    def _kl_penalty(self, batch: RolloutBatch, kl_coef: float) -> tuple[Tensor, dict[str, float]]:
        """Returns -kl_coef x KL of each action token, the KL in the reward (Ziegler et al. 2019, eq. 2), and the mean
        of that KL, of several datasources each one's, too."""
        assert batch.old_logprobs_N is not None
        assert batch.ref_logprobs_N is not None
        kl_N = kl_estimate(batch.old_logprobs_N, batch.ref_logprobs_N, self._algo.kl.estimator)
        if batch.taught_S is not None:
            kl_N = torch.where(batch.taught_S[batch.sequence_ids_N], kl_N, 0.0)
        metrics = {"policy/ref_kl": float(kl_N[batch.action_mask_N].mean())}
        names = sorted(set(batch.datasources_S))
        if 1 < len(names) <= MOST_SETS:
            numbers_S = torch.tensor([names.index(name) for name in batch.datasources_S])
            numbers_A, kl_A = numbers_S[batch.sequence_ids_N][batch.action_mask_N], kl_N[batch.action_mask_N]
            for number, name in enumerate(names):
                metrics[f"policy/ref_kl/{name}"] = float(kl_A[numbers_A == number].mean())
        return torch.where(batch.action_mask_N, -kl_coef * kl_N, 0.0), metrics

    def _with_advantages(
        self,
        batch: RolloutBatch,
        token_rewards_N: Tensor,
        states: TurnStates | None,
        scores: TokenScores | None,
        metrics: dict[str, float],
    ) -> RolloutBatch:
        advantage = self._algo.advantage
        parts_SK = batch.reward_parts_SK
        weights = self._reward.weights or {}
        weights_K = torch.tensor([weights.get(name, 1.0) for name in batch.part_names])
        if parts_SK is not None:
            means_K = parts_SK.double().sum(0) * weights_K / batch.rollouts
            metrics |= {f"{PART}{name}": float(mean) for name, mean in zip(batch.part_names, means_K, strict=True)}
        if "reward_parts" in estimator_traits(advantage.estimator).needs:
            _check_parts(advantage.estimator, batch, weights_K)
        result = estimate(
            advantage.estimator,
            EstimatorInput(
                rewards_N=batch.rewards_N,
                token_rewards_N=token_rewards_N,
                action_mask_N=batch.action_mask_N,
                turn_ids_N=batch.turn_ids_N,
                lengths_S=batch.lengths_S,
                group_ids_S=batch.group_ids_S,
                sample_ids_S=batch.sample_ids_S,
                values_N=batch.values_N,
                baselines_S=batch.baselines_S,
                reward_parts_SK=parts_SK,
                part_weights_K=weights_K,
                state_ids_N=None if states is None else states.ids_N,
                logprobs_N=None if scores is None else scores.logprobs_N,
                collision_N=None if scores is None else scores.collision_N,
                roles_S=batch.roles_S or None,
            ),
            advantage,
            whiten=advantage.whiten,
            std_norm=not advantage.no_std_norm,
            settings=getattr(self._algo.estimators, advantage.estimator, None),
        )
        metrics |= advantage_metrics(batch, result, estimator=advantage.estimator, others=metrics)
        return evolve(batch, advantages_N=result.advantages_N, returns_N=result.returns_N)

    def _passes(self, batch: Batch, model: PolicyModel | ReferenceModel | ValueModel) -> Passes[Batch]:
        return split(batch, self._max_tokens, self._shares, padded=model.padded())


def _moved(column: Tensor, taught: PackedBatch, batch: PackedBatch) -> Tensor:
    """Returns a column of a batch as it is taught at the action tokens of the batch itself, 0 elsewhere."""
    if torch.equal(taught.action_mask_N, batch.action_mask_N):  # each token is at its own place
        return column
    return batch.placed(column[taught.action_mask_N])


def _told(batch: RolloutBatch, trajectories: Sequence[Trajectory], prompts: TeacherPrompts) -> RolloutBatch:
    """Returns the batch with what the teacher reads; of a rollout that it does not teach, what the policy reads."""
    rollouts = [(t.group_id, t.sample_id) for t in trajectories]
    taught_S = torch.tensor([rollout in prompts for rollout in rollouts])
    places = zip(rollouts, batch.starts_S.tolist(), batch.prompt_lengths_S.tolist(), strict=True)
    told_S = tuple(
        prompts.get(rollout) or tuple(batch.tokens_N[start : start + length].tolist())
        for rollout, start, length in places
    )
    return evolve(batch, teacher_prompts_S=told_S, taught_S=None if bool(taught_S.all()) else taught_S)


def _check_parts(estimator: str, batch: RolloutBatch, weights_K: Tensor) -> None:
    """Checks that each rollout's reward consists of named rewards alone, because the estimator would ignore others.

    Raises:
        RewardError: there are no named rewards, or a rollout has others.
    """
    if batch.reward_parts_SK is None:
        raise RewardError(
            f"algo.advantage.estimator {estimator} normalises several named rewards apart, but the reward has no "
            "names: name several with --reward.function_path, or return a mapping of named rewards."
        )
    named_S = (batch.reward_parts_SK * weights_K).sum(1)
    total_R = shaping.outcomes(batch)
    named_R = torch.zeros_like(total_R).index_add_(0, batch.rollout_ids_S, named_S)
    wrong_R = (total_R - named_R).abs() > PARTS_SLACK * (1 + named_R.abs())
    if bool(wrong_R.any()):
        first = int(wrong_R.nonzero()[0, 0])
        raise RewardError(
            f"algo.advantage.estimator {estimator} compares named rewards, but an episode earned "
            f"{float(total_R[first]):g} in all and {float(named_R[first]):g} by name: give every reward of an episode "
            "a name and its weight (--reward.weights), or set --algo.advantage.estimator to group_norm."
        )
