"""An episode is learned from in the same way whether or not its history was rewritten.

The same random episodes are recorded twice by a `TokenLedger`: with a template that keeps the history as it is, and
with one that leaves thinking out of it, so that replies open branches. Advantage, target and loss weights of each
sampled token must not differ, under any estimator, whitening, aggregation, shaping and KL in the reward, also where the
rollout is divided over optimizer steps and micro-batches.
"""

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.metrics import rollout_metrics
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.domain.algorithms.catalogue import ESTIMATORS
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective, PolicyLossObjective
from rollgrad.domain.algorithms.settings import (
    AdvantageSettings,
    Aggregation,
    KLEstimator,
    KLSettings,
    Whiten,
)
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.models import VOCABULARY, FakePolicy, FakeReference, FakeValue

WEIGHTS = {"right": 1.0, "short": 0.5}
"""Names of the rewards of an episode."""
EXAMPLES = int(os.environ.get("ROLLGRAD_EXAMPLES", "2"))
"""Random episodes for each estimator; ROLLGRAD_EXAMPLES=100 before pytest is the long form."""
LIMIT = 40
"""Sampled tokens of an episode that penalties of length go by."""

Token = tuple[tuple[int, ...], int]
"""(the reply, which none other equals; its place in it)."""


def play(rng: random.Random, *, group: int, sample: int, forgetful: bool, parts_only: bool) -> list[Trajectory]:
    """One episode of up to four turns, some of which go back to an earlier conversation, as after a sub-agent."""
    codec = FakeChatCodec(forgetful=forgetful)
    ledger = TokenLedger(codec)
    conversations: list[list[Message]] = [[{"role": "user", "content": "3+4?"}]]
    turns = rng.randint(1, 4)
    for turn in range(turns):
        messages = rng.choice(conversations) if rng.random() < 0.3 else conversations[-1]
        prepared = ledger.prepare(messages)
        thought = "(hm)" if rng.random() < 0.7 else ""
        said = f"{thought}{group}.{sample}.{turn}" + "x" * rng.randint(0, 5)
        tokens = codec.encode(said)
        generation = Generation(
            token_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens), stop_reason=StopReason.STOP
        )
        message = codec.parse(said, "").message
        ledger.commit(prepared, generation, message)
        ledger.set_reward(turn, 0.0 if parts_only else rng.choice([0.0, 0.25, 1.0]))
        conversations.append([*messages, message, {"role": "user", "content": "And?"}])
    parts = {"right": rng.choice([0.0, 1.0]), "short": rng.choice([0.0, 0.5, 1.0])}
    if parts_only:
        ledger.reward_last(sum(WEIGHTS[name] * value for name, value in parts.items()))
    stop = rng.choice([StopReason.STOP, StopReason.LENGTH])
    return ledger.trajectories(group_id=group, sample_id=sample, stop_reason=stop, reward_parts=parts)


def episodes(seed: int, *, forgetful: bool, parts_only: bool) -> list[Trajectory]:
    rng = random.Random(seed)
    return [
        trajectory
        for group in range(2)
        for sample in range(rng.randint(2, 4))
        for trajectory in play(rng, group=group, sample=10 * group + sample, forgetful=forgetful, parts_only=parts_only)
    ]


def sampled(trajectories: Sequence[Trajectory]) -> list[Token]:
    """Each sampled token, in the order of the packed batch."""
    return [
        (tuple(t.token_ids_T[s.start : s.stop].tolist()), place)
        for t in trajectories
        for s in t.segments
        if s.kind is SegmentKind.ACTION
        for place in range(s.stop - s.start)
    ]


def learned(
    trajectories: Sequence[Trajectory], *, algo: AlgoConfig, reward: RewardConfig, steps: dict[str, Any]
) -> dict[Token, list[float]]:
    """Advantage, target and both loss weights of every sampled token."""
    generator = torch.Generator().manual_seed(0)
    critic = FakeValue(lr=0.0)
    critic.load_state_dict({"table": torch.randn(VOCABULARY, generator=generator), "steps": 0})
    policy = FakePolicy(torch.randn(VOCABULARY, generator=generator), lr=0.0)
    reference = FakeReference(torch.randn(VOCABULARY, generator=generator))
    service = ExperienceService(
        policy,
        reference=reference,
        critic=critic,
        algo=algo,
        reward=reward,
        max_length=LIMIT,
        max_tokens=60,
        steps_per_rollout=2,
    )
    batch = service.make(trajectories, 0.1, {0: 0.5, 1: 0.25}).batch
    names = dict(zip(batch.action_mask_N.nonzero()[:, 0].tolist(), sampled(trajectories), strict=True))
    # select() carries tokens along: what names them is their place, which is put where their versions were.
    batch.versions_N.copy_(torch.arange(batch.token_count))
    UpdateService(policy, critic, max_length=LIMIT, epochs=1, max_tokens=60, seed=0, **steps).run(
        batch, PolicyLossObjective(), ClippedValueObjective(clip=None)
    )
    result = {}
    for part in (part for step in policy.updates for part in step):
        mask_N = part.action_mask_N
        columns = [part.filled(f"{name}_N")[mask_N].tolist() for name in COLUMNS]
        for place, *values in zip(part.versions_N[mask_N].tolist(), *columns, strict=True):
            result[names[place]] = values
    return result


COLUMNS = ("advantages", "returns", "loss_weights", "value_weights", "positive_weights")


@st.composite
def shapings(draw: st.DrawFn, *, parts: bool) -> RewardConfig:
    """Any shaping of rewards; none where the named rewards are compared apart, which it does not reach."""
    if parts:
        return RewardConfig(weights=WEIGHTS)
    return RewardConfig(
        overlong_buffer_len=draw(st.sampled_from([None, 20])),
        group_length_coef=draw(st.sampled_from([0.0, 0.5])),
        stop_properly_penalty_coef=draw(st.sampled_from([None, 0.5])),
        normalize=draw(st.sampled_from([Normalise.NONE, Normalise.RUNNING])),
        clip_range=draw(st.sampled_from([None, (0.0, 2.0)])),
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_a_rewritten_history_changes_nothing(estimator: str, data: st.DataObject, seed: int) -> None:
    traits = ESTIMATORS[estimator]
    parts = "reward_parts" in traits.needs
    given_settings = {
        "gamma": data.draw(st.sampled_from([1.0, 0.9])),
        "lambd": data.draw(st.sampled_from([1.0, 0.8])),
        "critic_lambd": data.draw(st.sampled_from([None, 0.7])),
        "length_adaptive_alpha": data.draw(st.sampled_from([None, 0.5])),
        "pass_k": data.draw(st.sampled_from([1, 2])),
    }
    algo = AlgoConfig(
        advantage=AdvantageSettings(
            estimator=estimator, whiten=data.draw(st.sampled_from([None, *Whiten])), **given_settings
        ),
        kl=KLSettings(init_coef=0.1, estimator=data.draw(st.sampled_from([KLEstimator.K1, KLEstimator.K3]))),
    )
    reward = data.draw(shapings(parts=parts))
    if estimator == "maxrl":
        reward.normalize, reward.clip_range = Normalise.NONE, (0.0, 2.0)  # it takes no negative outcome
    steps = {
        "aggregation": data.draw(st.sampled_from(list(Aggregation))),
        "batch_size": data.draw(st.sampled_from([None, 2])),
    }
    plain, rewritten = (episodes(seed, forgetful=forgetful, parts_only=parts) for forgetful in (False, True))
    assume(len(rewritten) > len(plain))
    wanted = learned(plain, algo=algo, reward=reward, steps=steps)
    found = learned(rewritten, algo=algo, reward=reward, steps=steps)
    assert found.keys() == wanted.keys()
    for token, values in wanted.items():
        assert found[token] == pytest.approx(values, rel=1e-4, abs=1e-5), token


def talk(turns: int, *, forgetful: bool, reward: float = 0.0) -> TokenLedger:
    """One episode whose turns have a reward each."""
    ledger, messages = TokenLedger(codec := FakeChatCodec(forgetful=forgetful)), [{"role": "user", "content": "?"}]
    for turn in range(turns):
        tokens = codec.encode(said := f"(hm){turn}")
        generation = Generation(
            token_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens), stop_reason=StopReason.STOP
        )
        message = codec.parse(said, "").message
        ledger.set_reward(ledger.commit(ledger.prepare(messages), generation, message), reward)
        messages = [*messages, message, {"role": "user", "content": "And?"}]
    return ledger


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_turn_s_state_is_what_was_said_since_the_reply_before(forgetful: bool) -> None:
    """It is so whatever was replied, whether or not the template rewrites the history; one with a name is apart."""

    def states(ledger: TokenLedger) -> list[int | None]:
        played = ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP)
        actions = [s for t in played for s in t.segments if s.kind is SegmentKind.ACTION]
        return [action.state for action in sorted(actions, key=lambda action: action.turn or 0)]

    ledger = talk(3, forgetful=forgetful)
    opening, asked, again = states(ledger)
    assert asked == again != opening
    assert states(talk(1, forgetful=False)) == [opening]
    codec, messages = FakeChatCodec(), [{"role": "user", "content": "?"}]
    tokens = codec.encode("yes")
    reply = Generation(token_ids=tokens, logprobs=[-1.0] * 3, versions=[0] * 3, stop_reason=StopReason.STOP)
    named = []
    for name in ("start", "start", "And?", None):
        alone = TokenLedger(codec)
        alone.commit(alone.prepare(messages), reply, codec.parse("yes", "").message, state=name)
        named += states(alone)
    assert named[0] == named[1] != named[2]
    assert named[3] == opening
    assert named[2] != asked, "a name is no text that was said"


@pytest.mark.parametrize("estimator", ["gae", "turn_gae", "reinforce"])
@pytest.mark.parametrize("forgetful", [False, True])
def test_every_turn_of_a_won_episode_is_praised(estimator: str, forgetful: bool) -> None:
    """Three turns, success 1 at the end, and a critic that expects nothing."""
    ledger = talk(3, forgetful=forgetful)
    ledger.reward_last(1.0)
    won = ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP)
    assert len(won) == (3 if forgetful else 1)
    service = ExperienceService(
        FakePolicy(),
        reference=None,
        critic=FakeValue(),
        algo=AlgoConfig(advantage=AdvantageSettings(estimator=estimator, whiten=Whiten.NONE)),
        reward=RewardConfig(),
        max_length=LIMIT,
        max_tokens=1000,
        steps_per_rollout=1,
    )
    batch = service.make(won, 0.0).batch
    for column_N in (batch.filled("advantages_N"), batch.filled("returns_N")):
        assert (column_N[batch.action_mask_N] == 1.0).all()


@pytest.mark.parametrize("forgetful", [False, True])
def test_ten_tenths_are_a_whole(forgetful: bool) -> None:
    """Added one after the other they are 0.9999999999999999, which does not pass where 1 does."""
    played = talk(10, forgetful=forgetful, reward=0.1).trajectories(
        group_id=0, sample_id=0, stop_reason=StopReason.STOP
    )
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1,), text="?"), trajectories=tuple(played))
    assert (group.scores, group.rewards) == ([1.0], [1.0])
    assert rollout_metrics([group], pass_threshold=1.0)["reward/mean"] == 1.0
