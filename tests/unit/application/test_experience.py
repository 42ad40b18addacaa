"""From trajectories to advantages: what is scored, by whom and only when needed."""

from collections.abc import Sequence

import pytest
import torch
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.application.learning.experience import Experience, ExperienceService
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.domain.algorithms.catalogue import ESTIMATORS
from rollgrad.domain.algorithms.estimators import EstimatorInput, estimate
from rollgrad.domain.algorithms.losses.kl import kl_estimate
from rollgrad.domain.algorithms.settings import AdvantageSettings, KLEstimator, KLSettings, OldLogprobs
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.top_logprobs import TopLogprobs
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError, RewardError
from rollgrad.domain.ports.models import Predictions, ReferenceModel, TokenScores
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.models import VOCABULARY, FakePolicy, FakeReference, FakeValue

TRAJECTORIES = [
    make_trajectory([1, 2], [3 + i, 4], *([[8, 8], [5]] if i == 2 else []), group_id=i // 2, sample_id=i, rewards=[i])
    for i in range(4)
]
TILT = torch.linspace(-1, 1, VOCABULARY)


def algo(estimator: str = "rloo", **settings: object) -> AlgoConfig:
    kl = settings.pop("kl", KLSettings())
    return AlgoConfig(advantage=AdvantageSettings(estimator=estimator, **settings), kl=kl)  # type: ignore[arg-type]


def make(
    config: AlgoConfig,
    *,
    trajectories: Sequence[Trajectory] | None = None,
    policy: FakePolicy | None = None,
    reference: FakeReference | None = None,
    critic: FakeValue | None = None,
    clip: tuple[float, float] | None = None,
    steps: int = 1,
    always_scores: bool = False,
    max_tokens: int = 1000,
    coef: float = 0.0,
) -> Experience:
    service = ExperienceService(
        policy or FakePolicy(TILT),
        reference=reference,
        critic=critic,
        algo=config,
        reward=RewardConfig(clip_range=clip),
        max_length=16,
        max_tokens=max_tokens,
        steps_per_rollout=steps,
        always_scores=always_scores,
    )
    return service.make(trajectories or TRAJECTORIES, coef)


def test_leave_one_out_advantages_of_a_group() -> None:
    batch = make(algo()).batch
    per_sequence = [part[mask] for part, mask in zip(*by_sequence(batch), strict=True)]
    for values, expected in zip(per_sequence, [-1.0, 1.0, -1.0, 1.0], strict=True):
        torch.testing.assert_close(values, torch.full_like(values, expected))


def test_each_role_is_compared_with_itself_and_counts_as_a_rollout() -> None:
    """Two games of two sides: were they compared together, the losers' advantage would hide who moves first."""

    def side(sample: int, role: str, tokens: int, reward: float) -> Trajectory:
        made = make_trajectory([1], [2] * tokens, group_id=5, sample_id=sample, rewards=[reward])
        return evolve(made, role=role)

    games = [side(0, "first", 1, 1.0), side(0, "second", 2, -1.0), side(1, "first", 3, 1.0), side(1, "second", 4, 1.0)]
    experience = make(algo("dr_grpo"), trajectories=games)
    batch = experience.batch
    first, second = (make(algo("dr_grpo"), trajectories=games[place::2]).batch for place in (0, 1))
    for place, alone in ((0, first), (1, second)):
        own = [by_sequence(batch)[0][place], by_sequence(batch)[0][place + 2]]
        torch.testing.assert_close(torch.cat(own), alone.advantages_N, rtol=0, atol=0)
    assert [float(values[-1]) for values in by_sequence(batch)[0]] == [0.0, -1.0, 0.0, 1.0]
    assert batch.rollouts == 4
    assert batch.unit_count == 2, "an optimizer step has both sides of a game"
    assert batch.roles_S == ("first", "second") * 2
    assert len(set(batch.group_ids_S.tolist())) == 2


def test_rewards_of_each_role_are_normalised_as_if_it_were_alone() -> None:
    """The second side loses most games: by a mean of both, its rare wins and usual defeats would weigh otherwise."""
    algorithm = algo("reinforce")  # without a baseline, which would hide a shift

    def games(rewards: Sequence[tuple[float, float]]) -> list[Trajectory]:
        return [
            evolve(make_trajectory([1], [2, 3], [9], [4], sample_id=sample, rewards=[0.5, reward]), role=role)
            for sample, each in enumerate(rewards)
            for role, reward in zip(("first", "count"), each, strict=True)  # a key of older states, too
        ]

    def service() -> ExperienceService:
        reward = RewardConfig(normalize=Normalise.RUNNING)
        return ExperienceService(
            FakePolicy(TILT),
            reference=None,
            critic=None,
            algo=algorithm,
            reward=reward,
            max_length=16,
            max_tokens=1000,
            steps_per_rollout=1,
        )

    together, alone = service(), (service(), service())
    for rewards in ([(1.0, -1.0), (2.0, -1.0), (1.0, 0.5)], [(3.0, -2.0), (1.0, 7.0)]):
        played = games(rewards)
        batch = together.make(played, 0.0).batch
        for place, own in enumerate(alone):
            expected = own.make(played[place::2], 0.0).batch
            found = torch.cat(batch.rewards_N.split(batch.lengths_S.tolist())[place::2])
            assert torch.equal(found, expected.rewards_N)
            assert float(expected.rewards_N.abs().max()) > 0
        continued = service()
        continued.load_state_dict(together.state_dict())
        together = continued
    assert set(together.state_dict()) == {"first", "count"}


def test_moments_of_a_state_without_roles_are_those_of_episodes_without() -> None:
    service = ExperienceService(
        FakePolicy(TILT),
        reference=None,
        critic=None,
        algo=algo(),
        reward=RewardConfig(normalize=Normalise.RUNNING),
        max_length=16,
        max_tokens=1000,
        steps_per_rollout=1,
    )
    service.load_state_dict({"count": 2.0, "mean": 4.0, "squares": 8.0})
    service.make(TRAJECTORIES, 0.0)
    assert service.state_dict()[""]["count"] == 2.0 + len(TRAJECTORIES)


def by_sequence(batch: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    lengths = batch.lengths_S.tolist()  # type: ignore[attr-defined]
    return (
        list(batch.advantages_N.split(lengths)),  # type: ignore[attr-defined]
        list(batch.action_mask_N.split(lengths)),  # type: ignore[attr-defined]
    )


def test_likely_tokens_are_for_score_centering_alone() -> None:
    """A client may have asked for some where it is off."""
    told = TopLogprobs(torch.ones(2, 3, dtype=torch.int32), torch.full((2, 3), -1.0))
    trajectories = [evolve(TRAJECTORIES[0], top_logprobs=told), *TRAJECTORIES[1:]]
    assert make(algo(), trajectories=trajectories).batch.sampler_ids_NK is None
    centred = algo()
    centred.score_centering_top_k = 3
    policy, reference = FakePolicy(TILT), FakeReference(TILT)
    batch = make(centred, trajectories=trajectories, policy=policy, reference=reference, steps=2).batch
    assert batch.sampler_ids_NK is not None
    assert batch.sampler_ids_NK.shape == (batch.token_count, 3)
    assert batch.for_other_models().sampler_ids_NK is None
    with pytest.raises(EngineError, match="top_k is 3, but of no token"):
        make(centred)


def test_prompts_that_do_not_say_what_the_reference_reads_are_refused() -> None:
    told = algo("on_policy_distill", kl=KLSettings(init_coef=0.5, teacher_template="{label}"))
    with pytest.raises(DataError, match="no prompt of this rollout says what the reference reads"):
        make(told, reference=FakeReference(TILT))


def test_rollouts_without_the_experts_that_should_be_replayed_are_named_once() -> None:
    experts_TLK = torch.zeros(len(TRAJECTORIES[0]), 1, 1, dtype=torch.uint8)
    routed = [evolve(TRAJECTORIES[0], experts_TLK=experts_TLK), *TRAJECTORIES[1:]]
    for replays, trajectories, named in ((True, TRAJECTORIES, 1), (True, routed, 0), (False, TRAJECTORIES, 0)):
        service = ExperienceService(
            FakePolicy(TILT),
            reference=None,
            critic=None,
            algo=algo(),
            reward=RewardConfig(),
            max_length=16,
            max_tokens=1000,
            steps_per_rollout=1,
            replays=replays,
        )
        with capture_logs() as logs:
            for _ in range(2):
                service.make(trajectories, 0.0)
        assert [log["event"].split()[0] for log in logs] == ["actor.router_replay"] * named


class Reading(FakeReference):
    """A reference whose log-prob of a token is minus the sum of those before it in its sequence."""

    def score(self, batch: PackedBatch) -> TokenScores:
        before_N = batch.tokens_N.cumsum(0) - batch.tokens_N
        logprobs_N = (before_N[batch.starts_S][batch.sequence_ids_N] - before_N) / 100
        logprobs_N = torch.where(batch.action_mask_N, logprobs_N, 0.0)
        return TokenScores(logprobs_N=logprobs_N, entropy_N=torch.zeros_like(logprobs_N))


class Guessing(Reading):
    """A reference whose likeliest token is the sum of those before it in its sequence."""

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        sums_A = (-100 * self.score(batch).logprobs_N[batch.action_mask_N]).round().int()
        return Predictions(ids_AK=sums_A[:, None], logprobs_AB=torch.full((len(sums_A), 2), -0.7))


@pytest.mark.parametrize("max_tokens", [1, 7, 1000])
def test_the_full_estimator_reads_what_the_reference_predicts(max_tokens: int) -> None:
    played = [make_trajectory([1, 2], [5, 6, 7][: 1 + i % 3], group_id=i // 2, sample_id=i) for i in range(5)]
    told = {0: (40, 50, 60), 1: (9,), 2: (1, 2)}
    kl = KLSettings(init_coef=0.5, use_loss=True, estimator=KLEstimator.FULL, top_k=1)
    critic = Whole()
    service = ExperienceService(
        FakePolicy(TILT),
        reference=Guessing(),
        critic=critic,
        algo=algo("gae", kl=kl),
        reward=RewardConfig(),
        max_length=16,
        max_tokens=max_tokens,
        steps_per_rollout=1,
    )
    batch = service.make(played, 0.5, teacher_prompts={(i // 2, i): told[i // 2] for i in range(5)}).batch
    expected = [sum(told[i // 2]) + sum([5, 6, 7][:place]) for i in range(5) for place in range(1 + i % 3)]
    ids_NK, logprobs_NK = batch.filled("teacher_ids_NK"), batch.filled("teacher_logprobs_NK")
    assert ids_NK[batch.action_mask_N, 0].tolist() == expected
    assert (logprobs_NK[batch.action_mask_N] == -0.7).all()
    assert not ids_NK[~batch.action_mask_N].any()
    assert not logprobs_NK[~batch.action_mask_N].any()
    assert batch.ref_logprobs_N is None
    assert batch.select([3, 1]).filled("teacher_ids_NK")[:, 0].tolist() == [0, 0, 9, 0, 0, 150, 155]
    assert not critic.saw_predictions


class Whole(FakeValue):
    """A critic that notices what it is not to get."""

    saw_predictions = False

    def values(self, batch: PackedBatch) -> torch.Tensor:
        self.saw_predictions = self.saw_predictions or batch.teacher_ids_NK is not None
        return super().values(batch)


def test_a_reference_without_predictions_is_refused() -> None:
    class Silent(ReferenceModel):
        def score(self, batch: PackedBatch) -> TokenScores:
            return FakeReference(TILT).score(batch)

    kl = KLSettings(init_coef=0.5, use_loss=True, estimator=KLEstimator.FULL, top_k=2)
    with pytest.raises(ConfigurationError, match="a Silent, is no PredictingModel"):
        make(algo(kl=kl), reference=Silent())  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [1, 7, 1000])
def test_a_reference_that_is_told_more_judges_the_same_tokens(max_tokens: int) -> None:
    played = [make_trajectory([1, 2], [5, 6, 7][: 1 + i % 3], group_id=i // 2, sample_id=i) for i in range(5)]
    told = {0: (40, 50, 60), 1: (9,), 2: (1, 2)}

    def judged(told: dict[tuple[int, int], tuple[int, ...]] | None) -> Experience:
        service = ExperienceService(
            FakePolicy(TILT),
            reference=Reading(),
            critic=None,
            algo=algo("on_policy_distill", kl=KLSettings(init_coef=0.5)),
            reward=RewardConfig(),
            max_length=16,
            max_tokens=max_tokens,
            steps_per_rollout=1,
        )
        return service.make(played, 0.5, teacher_prompts=told)

    of_rollouts = {(i // 2, i): told[i // 2] for i in range(5)}
    batch = judged(of_rollouts).batch
    expected = [-(sum(told[i // 2]) + sum([5, 6, 7][:place])) / 100 for i in range(5) for place in range(1 + i % 3)]
    assert batch.ref_logprobs_N is not None
    assert batch.ref_logprobs_N[batch.action_mask_N].tolist() == pytest.approx(expected)
    assert not batch.ref_logprobs_N[~batch.action_mask_N].any()
    assert batch.teacher_prompts_S == (), "no update reads them"
    old_N = batch.filled("old_logprobs_N")
    wanted_N = -0.5 * (old_N - batch.ref_logprobs_N)
    torch.testing.assert_close(batch.filled("advantages_N"), torch.where(batch.action_mask_N, wanted_N, 0.0))
    assert batch.taught_S is None
    some = judged({rollout: read for rollout, read in of_rollouts.items() if rollout[1] not in (0, 3)})
    assert some.metrics["policy/taught_share"] == pytest.approx(3 / 5)
    taught_N = ~torch.isin(batch.sample_ids_S, torch.tensor([0, 3]))[batch.sequence_ids_N]
    torch.testing.assert_close(
        some.batch.filled("advantages_N"), torch.where(taught_N, wanted_N, 0.0) * batch.action_mask_N
    )
    assert some.reference_kl == pytest.approx(float((wanted_N / -0.5)[taught_N & batch.action_mask_N].sum()) / 9)
    none = judged({})
    assert none.metrics["policy/taught_share"] == 0.0
    assert not none.batch.filled("advantages_N").any(), "no reply passed beside another"
    plain = judged(None).batch.ref_logprobs_N
    assert plain is not None
    assert plain[batch.action_mask_N][0] == pytest.approx(-0.03)


def test_a_reward_for_length_within_the_group_comes_before_the_baseline() -> None:
    played = [
        make_trajectory([1], [5] * length, group_id=0, sample_id=i, rewards=[reward])
        for i, (length, reward) in enumerate([(2, 1.0), (4, 1.0), (6, 0.0)])
    ]
    service = ExperienceService(
        FakePolicy(TILT),
        reference=None,
        critic=None,
        algo=algo("dr_grpo"),
        reward=RewardConfig(group_length_coef=0.2),
        max_length=16,
        max_tokens=1000,
        steps_per_rollout=1,
    )
    batch = service.make(played, 0.0).batch
    first = [1, 4, 9]  # the first sampled token of each
    expected = [reward - (1.1 + 1.0 - 0.1) / 3 for reward in (1.1, 1.0, -0.1)]
    assert batch.filled("advantages_N")[first].tolist() == pytest.approx(expected)


def test_one_step_without_kl_scores_nothing() -> None:
    policy = FakePolicy(TILT)
    experience = make(algo(), policy=policy)
    assert not policy.scored
    assert experience.batch.old_logprobs_N is None
    assert experience.batch.ref_logprobs_N is None


def test_several_steps_need_the_policys_own_logprobs() -> None:
    policy = FakePolicy(TILT)
    experience = make(algo(), policy=policy, steps=2)
    old_N = experience.batch.old_logprobs_N
    assert old_N is not None
    assert torch.equal(old_N, policy.score(experience.batch).logprobs_N)


def test_one_step_that_draws_by_chance_is_compared_with_scores_that_do_not() -> None:
    policy = FakePolicy(TILT)
    batch = make(algo(), policy=policy, always_scores=True).batch
    assert batch.old_logprobs_N is not None
    assert torch.equal(batch.old_logprobs_N, policy.score(batch).logprobs_N)


def test_the_rollouts_logprobs_stand_in_when_told() -> None:
    policy = FakePolicy(TILT)
    config = algo()
    config.old_logprobs = OldLogprobs.ROLLOUT
    experience = make(config, policy=policy, steps=3)
    assert not policy.scored
    assert torch.equal(experience.batch.old_logprobs_N, experience.batch.rollout_logprobs_N)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", list(OldLogprobs))
@pytest.mark.parametrize("steps", [1, 2])
def test_entropies_before_the_update_are_found_where_the_loss_chooses_by_them(source: OldLogprobs, steps: int) -> None:
    """They take the pass that finds log-probs, where there is one, and leave those as they would be."""
    policy, without = FakePolicy(TILT), FakePolicy(TILT)
    config = algo()
    config.old_logprobs = source
    plain = make(config, policy=without, steps=steps).batch
    config.top_entropy_quantile = 0.2
    batch = make(config, policy=policy, steps=steps).batch
    assert len(policy.scored) == 1
    assert len(without.scored) == (source is OldLogprobs.RECOMPUTE and steps == 2)
    assert plain.entropies_N is None
    assert batch.entropies_N is not None
    assert torch.equal(batch.entropies_N, policy.score(batch).entropy_N)
    for found, wanted in zip((batch.old_logprobs_N,), (plain.old_logprobs_N,), strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or wanted is None or torch.equal(found, wanted)


@pytest.mark.parametrize("source", list(OldLogprobs))
@pytest.mark.parametrize("steps", [1, 2])
def test_a_baseline_of_each_token_is_weighed_by_the_policy_before_the_update(source: OldLogprobs, steps: int) -> None:
    """It takes the pass that finds log-probs, where there is one, and leaves those as they would be."""
    policy = FakePolicy(TILT)
    config = algo("optimal_token_baseline")
    config.old_logprobs = source
    batch = make(config, policy=policy, steps=steps).batch
    assert len(policy.scored) == 1
    plain = algo("dr_grpo")
    plain.old_logprobs = source
    before = make(plain, steps=steps).batch.old_logprobs_N
    assert (batch.old_logprobs_N is None) == (before is None)
    scores = policy.score(batch)
    assert scores.collision_N is not None
    assert batch.advantages_N is not None
    wanted = estimate(
        "optimal_token_baseline",
        EstimatorInput(
            rewards_N=batch.rewards_N,
            token_rewards_N=torch.zeros_like(batch.rewards_N),
            action_mask_N=batch.action_mask_N,
            turn_ids_N=batch.turn_ids_N,
            lengths_S=batch.lengths_S,
            group_ids_S=batch.group_ids_S,
            sample_ids_S=batch.sample_ids_S,
            logprobs_N=scores.logprobs_N,
            collision_N=scores.collision_N,
        ),
        config.advantage,
    )
    assert torch.equal(batch.advantages_N, wanted.advantages_N)
    assert batch.advantages_N.count_nonzero() > 0


@pytest.mark.parametrize("kind", [KLEstimator.K1, KLEstimator.K2, KLEstimator.K3])
def test_kl_in_the_reward_lowers_it_token_by_token(kind: KLEstimator) -> None:
    policy, reference = FakePolicy(TILT), FakeReference(-TILT)
    config = algo("reinforce", no_std_norm=True, kl=KLSettings(init_coef=0.5, estimator=kind))
    experience = make(config, policy=policy, reference=reference, coef=0.5)
    batch = experience.batch
    assert batch.old_logprobs_N is not None
    assert batch.ref_logprobs_N is not None
    mask = batch.action_mask_N
    kl_N = kl_estimate(batch.old_logprobs_N, batch.ref_logprobs_N, kind)
    assert experience.metrics["policy/ref_kl"] == pytest.approx(float(kl_N[mask].mean()))
    # gamma 1: the return of a token is all that comes after it; whitening by the mean only shifts every advantage.
    rewards = torch.where(mask, batch.rewards_N - 0.5 * kl_N, 0.0)
    expected = torch.cat([part.flip(0).cumsum(0).flip(0) for part in rewards.split(batch.lengths_S.tolist())])[mask]
    assert batch.advantages_N is not None
    torch.testing.assert_close(batch.advantages_N[mask], expected - expected.mean(), rtol=1e-4, atol=1e-5)


def test_kl_as_a_loss_leaves_the_reward_alone() -> None:
    kl = KLSettings(init_coef=0.5, estimator=KLEstimator.K3, use_loss=True)
    policy = FakePolicy(TILT)
    with_kl = make(algo(kl=kl), policy=policy, reference=FakeReference(-TILT), coef=0.5)
    without = make(algo())
    assert torch.equal(with_kl.batch.advantages_N, without.batch.advantages_N)  # type: ignore[arg-type]
    assert with_kl.batch.ref_logprobs_N is not None
    assert not policy.scored
    assert "policy/ref_kl" not in with_kl.metrics


def test_rewards_are_clipped_before_the_baseline() -> None:
    clipped = make(algo(), clip=(0.0, 1.0)).batch
    values = [part[mask][0] for part, mask in zip(*by_sequence(clipped), strict=True)]
    assert [float(v) for v in values] == pytest.approx([-1.0, 1.0, 0.0, 0.0])
    assert clipped.scores_S.tolist() == [0.0, 1.0, 2.0, 3.0], "scores stay what they were"


def test_rewards_are_shaped_then_normalised_then_clipped() -> None:
    """By length, of 6 tokens from 4 on: 1 - 0.25; by truncation: half of it."""
    service = ExperienceService(
        FakePolicy(TILT),
        reference=None,
        critic=None,
        algo=algo(),
        reward=RewardConfig(
            overlong_buffer_len=2,
            overlong_penalty_factor=0.5,
            stop_properly_penalty_coef=0.5,
            normalize=Normalise.DATASET,
            normalize_mean_std=(0.25, 0.5),
            clip_range=(0.0, 1.25),
        ),
        max_length=6,
        max_tokens=1000,
        steps_per_rollout=1,
    )
    ends = [(3, StopReason.STOP), (5, StopReason.STOP), (5, StopReason.LENGTH)]
    trajectories = [
        make_trajectory([1], [4] * length, sample_id=sample, rewards=[1.0], stop_reason=stop)
        for sample, (length, stop) in enumerate(ends)
    ]
    batch = service.make(trajectories, 0.0).batch
    last = batch.lengths_S.cumsum(0) - 1
    assert batch.rewards_N[last].tolist() == pytest.approx([1.25, (0.75 - 0.25) / 0.5, (0.375 - 0.25) / 0.5])


def test_rewards_of_greedy_rollouts_are_normalised_and_clipped_like_the_others() -> None:
    service = ExperienceService(
        FakePolicy(TILT),
        reference=None,
        critic=None,
        algo=algo("remax"),
        reward=RewardConfig(normalize=Normalise.DATASET, normalize_mean_std=(1.0, 2.0), clip_range=(-0.25, 0.5)),
        max_length=16,
        max_tokens=1000,
        steps_per_rollout=1,
    )
    batch = service.make(TRAJECTORIES, 0.0, {0: 2.0, 1: 9.0}).batch  # 0.5, and 4 before they are clipped
    values = [part[mask][0] for part, mask in zip(*by_sequence(batch), strict=True)]
    assert [float(v) for v in values] == pytest.approx([-0.25 - 0.5, 0.0 - 0.5, 0.5 - 0.5, 0.5 - 0.5])


def test_the_outcome_of_several_turns_is_clipped_and_not_each_turn() -> None:
    played = [
        make_trajectory([1], [5], [8], [6], sample_id=0, rewards=[0.75, 0.75]),  # each within, their sum beyond
        make_trajectory([1], [5], [8], [6], sample_id=1, rewards=[3.0, -2.5]),  # each beyond, their sum within
    ]
    clipped = make(algo(), trajectories=played, clip=(0.0, 1.0))
    assert clipped.metrics["reward/shaped_mean"] == pytest.approx((1.0 + 0.5) / 2)
    rewards = clipped.batch.rewards_N[clipped.batch.action_mask_N].tolist()
    assert rewards == pytest.approx([0.75, 0.25, 3.0, -2.5])


def test_gae_uses_the_critic_and_reports_what_it_explains() -> None:
    critic = FakeValue()
    experience = make(algo("gae", lambd=0.9, no_std_norm=True), critic=critic)
    assert experience.batch.values_N is not None
    assert experience.batch.returns_N is not None
    assert experience.metrics["critic/explained_variance"] == pytest.approx(0.0)


def test_the_explained_variance_and_the_sizes_of_advantages_are_those_of_action_tokens() -> None:
    """1 - Var(returns - values) / Var(returns); with lambda 1 the returns are the rewards alone."""
    critic = FakeValue()
    critic.load_state_dict(critic.state_dict() | {"table": torch.arange(VOCABULARY) - 3.0})
    experience = make(algo("gae", whiten="none"), critic=critic)
    batch, metrics = experience.batch, experience.metrics
    mask_N = batch.action_mask_N
    returns_A, advantages_A = batch.filled("returns_N")[mask_N].double(), batch.filled("advantages_N")[mask_N].double()
    assert returns_A.tolist() == pytest.approx([0, 0, 1, 1, 2, 2, 0, 3, 3], abs=1e-6)
    error_A = returns_A - batch.filled("values_N")[mask_N].double()
    explained = 1 - error_A.var(correction=0) / returns_A.var(correction=0)
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained), abs=1e-6)
    assert abs(float(explained)) > 0.1
    assert metrics["advantage/mean"] == pytest.approx(float(advantages_A.mean()), abs=1e-6)
    assert metrics["advantage/abs_mean"] == pytest.approx(float(advantages_A.abs().mean()), abs=1e-6)
    assert abs(metrics["advantage/mean"]) < metrics["advantage/abs_mean"]


def test_the_token_budget_changes_nothing() -> None:
    kl = KLSettings(init_coef=0.1)
    whole = make(algo("gae", kl=kl), reference=FakeReference(), critic=FakeValue(), coef=0.1)
    policy = FakePolicy(TILT)
    parts = make(
        algo("gae", kl=kl),
        policy=policy,
        reference=FakeReference(),
        critic=FakeValue(),
        coef=0.1,
        max_tokens=4,
    )
    assert len(policy.scored) == 4
    torch.testing.assert_close(parts.batch.advantages_N, whole.batch.advantages_N)
    assert parts.metrics == pytest.approx(whole.metrics)


def test_rewards_without_a_name_are_not_left_out_in_silence() -> None:
    """An estimator of named rewards would read half of an episode that was rewarded at a turn and by name."""
    played = [
        make_trajectory([1], [5], [8], [6], sample_id=i, rewards=[0.25, 1.0], reward_parts={"right": 1.0})
        for i in range(2)
    ]
    with pytest.raises(RewardError, match=r"earned 1\.25 in all and 1 by name"):
        make(algo("gdpo"), trajectories=played)
    alone = [make_trajectory([1], [5], sample_id=i, rewards=[i], reward_parts={"right": i}) for i in range(2)]
    batch = make(algo("gdpo"), trajectories=alone).batch
    assert batch.filled("advantages_N")[batch.action_mask_N].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


PLAIN = [
    name for name, traits in ESTIMATORS.items() if not {"greedy_baseline", "teacher", "reward_parts"} & {*traits.needs}
]


@pytest.mark.parametrize("estimator", PLAIN)
def test_what_is_no_action_has_no_advantage(estimator: str) -> None:
    critic = FakeValue() if "critic" in ESTIMATORS[estimator].needs else None
    batch = make(algo(estimator, pass_k=1), critic=critic).batch
    assert batch.advantages_N is not None
    assert not batch.advantages_N[~batch.action_mask_N].any()
    assert batch.advantages_N[batch.action_mask_N].any()
