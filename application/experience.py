"""Experience: from trajectories to a batch with advantages, ready to learn from."""

from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.application.config import AlgoConfig, OldLogprobs
from rollgrad.application.microbatch import per_token
from rollgrad.domain.batch import PackedBatch, pack
from rollgrad.domain.estimators import ESTIMATORS, EstimatorInput, EstimatorParams
from rollgrad.domain.losses.kl import kl_estimate
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel, ValueModel
from rollgrad.domain.shaping import clip_rewards
from rollgrad.domain.trajectory import Trajectory


@frozen(kw_only=True, eq=False)
class Experience:
    """A batch with advantages, and what was noticed while making it."""

    batch: PackedBatch
    metrics: dict[str, float]


class ExperienceService:
    """Scores trajectories under the policies involved and estimates advantages.

    Args:
        policy: the policy before its update.
        reference: None when KL plays no part.
        critic: None unless the estimator is gae.
        algo: algorithm settings.
        reward_clip: range that rewards are clamped to before any baseline, or None.
        max_tokens: token budget of one forward pass.
        steps_per_rollout: optimizer steps that one rollout feeds; with 1 the ratio is exactly 1 and the policy's
            log-probs before the update need not be computed for it.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        reference: ReferenceModel | None,
        critic: ValueModel | None,
        algo: AlgoConfig,
        reward_clip: tuple[float, float] | None,
        max_tokens: int,
        steps_per_rollout: int,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._algo = algo
        self._reward_clip = reward_clip
        self._max_tokens = max_tokens
        self._steps_per_rollout = steps_per_rollout

    def make(self, trajectories: Sequence[Trajectory], kl_coef: float) -> Experience:
        """Packs, scores and estimates; `kl_coef` is the controller's current weight."""
        batch = pack(trajectories)
        if self._reward_clip is not None:
            batch = evolve(batch, rewards_N=clip_rewards(batch.rewards_N, self._reward_clip))
        metrics: dict[str, float] = {}
        batch = self._with_old_logprobs(batch, metrics)
        token_rewards_N = torch.zeros(batch.token_count)
        if self._reference is not None:
            batch = evolve(
                batch,
                ref_logprobs_N=per_token(batch, self._max_tokens, lambda b: self._score(self._reference, b)),
            )
            if not self._algo.kl.use_loss:
                token_rewards_N = self._kl_penalty(batch, kl_coef, metrics)
        if self._critic is not None:
            batch = evolve(batch, values_N=per_token(batch, self._max_tokens, self._critic.values))
        return Experience(batch=self._with_advantages(batch, token_rewards_N, metrics), metrics=metrics)

    def _with_old_logprobs(self, batch: PackedBatch, metrics: dict[str, float]) -> PackedBatch:
        """Adds `old_logprobs_N` where the ratio or the KL penalty needs it."""
        if self._algo.old_logprobs is OldLogprobs.ROLLOUT:
            return evolve(batch, old_logprobs_N=batch.rollout_logprobs_N)
        penalised = self._reference is not None and not self._algo.kl.use_loss
        if self._steps_per_rollout == 1 and not penalised:
            return batch
        old_N = per_token(batch, self._max_tokens, lambda b: self._score(self._policy, b))
        gap_N = (old_N - batch.rollout_logprobs_N)[batch.action_mask_N]
        metrics["mismatch/abs_diff_mean"] = float(gap_N.abs().mean())
        metrics["mismatch/kl"] = float(kl_estimate(-gap_N, torch.zeros_like(gap_N), "k3").mean())
        return evolve(batch, old_logprobs_N=old_N)

    def _kl_penalty(self, batch: PackedBatch, kl_coef: float, metrics: dict[str, float]) -> Tensor:
        """-kl_coef * KL of each action token: KL in the reward (Ziegler et al. 2019, eq. 2)."""
        assert batch.old_logprobs_N is not None
        assert batch.ref_logprobs_N is not None
        kl_N = kl_estimate(batch.old_logprobs_N, batch.ref_logprobs_N, self._algo.kl.estimator)
        metrics["policy/ref_kl"] = float(kl_N[batch.action_mask_N].mean())
        return torch.where(batch.action_mask_N, -kl_coef * kl_N, 0.0)

    def _with_advantages(self, batch: PackedBatch, token_rewards_N: Tensor, metrics: dict[str, float]) -> PackedBatch:
        advantage = self._algo.advantage
        result = ESTIMATORS[advantage.estimator](
            EstimatorInput(
                rewards_N=batch.rewards_N,
                token_rewards_N=token_rewards_N,
                action_mask_N=batch.action_mask_N,
                lengths_S=batch.lengths_S,
                group_ids_S=batch.group_ids_S,
                sample_ids_S=batch.sample_ids_S,
                values_N=batch.values_N,
            ),
            EstimatorParams(gamma=advantage.gamma, lambd=advantage.lambd, std_norm=not advantage.no_std_norm),
        )
        actions_A = result.advantages_N[batch.action_mask_N]
        metrics["advantage/mean"] = float(actions_A.mean())
        metrics["advantage/abs_mean"] = float(actions_A.abs().mean())
        if batch.values_N is not None:
            metrics["critic/explained_variance"] = _explained_variance(
                batch.values_N[batch.action_mask_N], result.returns_N[batch.action_mask_N]
            )
        return evolve(batch, advantages_N=result.advantages_N, returns_N=result.returns_N)

    @staticmethod
    def _score(model: PolicyModel | ReferenceModel | None, batch: PackedBatch) -> Tensor:
        assert model is not None
        return model.score(batch).logprobs_N


def _explained_variance(values_A: Tensor, returns_A: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); 0 when the returns do not vary."""
    variance = returns_A.var(correction=0)
    return 0.0 if variance == 0 else float(1 - (returns_A - values_A).var(correction=0) / variance)
