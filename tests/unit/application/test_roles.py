"""Several roles in one episode are recorded as they would be alone, whatever they show each other."""

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.testing.chat_codec import FakeChatCodec

ROLES = ("first", "second", "third")
Call = tuple[str, list[Message], str]
"""(role, what it is shown, what it says)."""


def calls(seed: int) -> list[Call]:
    """Calls of an episode whose roles now and then continue what another one said as if it were their own."""
    rng = random.Random(seed)
    conversations: list[list[Message]] = [[{"role": "user", "content": "go"}]]
    made: list[Call] = []
    for _ in range(rng.randint(1, 8)):
        shown = rng.choice(conversations)
        said = rng.choice(["yes", "no", "(hm)perhaps"])
        made.append((rng.choice(ROLES), shown, said))
        conversations.append([*shown, FakeChatCodec().parse(said, "").message, {"role": "user", "content": "And?"}])
    return made


def recorded(played: Sequence[Call], rewards: dict[str, float]) -> list[Trajectory]:
    ledger, codec = TokenLedger(FakeChatCodec(forgetful=True)), FakeChatCodec()
    for role, shown, said in played:
        tokens = codec.encode(said)
        generation = Generation(
            token_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens), stop_reason=StopReason.STOP
        )
        ledger.commit(ledger.prepare(shown, role=role), generation, codec.parse(said, "").message)
    for role in ledger.roles:
        ledger.reward_last(rewards[role], role)
    return ledger.trajectories(group_id=3, sample_id=5, stop_reason=StopReason.STOP)


def told(trajectory: Trajectory) -> Any:
    segments = [(s.kind, s.start, s.stop, s.reward, s.state) for s in trajectory.segments]
    return trajectory.token_ids_T.tolist(), segments, trajectory.score, trajectory.role


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_each_role_is_recorded_as_if_it_played_alone(seed: int) -> None:
    played = calls(seed)
    rewards = dict(zip(ROLES, (1.0, -1.0, 0.5), strict=True))
    together = recorded(played, rewards)
    for role in {role for role, _, _ in played}:
        alone = recorded([call for call in played if call[0] == role], rewards)
        mine = [trajectory for trajectory in together if trajectory.role == role]
        assert [*map(told, mine)] == [*map(told, alone)]
        assert {trajectory.score for trajectory in mine} == {rewards[role]}
    batch = pack(together)
    assert batch.rollouts == len({role for role, _, _ in played})
    assert batch.unit_count == 1
    assert int(batch.action_mask_N.sum()) == sum(len(FakeChatCodec().encode(said)) for _, _, said in played)
