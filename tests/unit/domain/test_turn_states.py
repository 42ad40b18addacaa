"""States of turns become numbers that tell the same from others."""

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.domain.batches.packed import pack
from rollgrad.domain.batches.turn_states import TurnStates
from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory
from rollgrad.testing.agent_executor import make_trajectory

STATES = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.sampled_from([None, 7, -(2**63), 8]), min_size=1, max_size=3))
)


def played(group: int, sample: int, states: list[int | None]) -> Trajectory:
    """An episode of turns of two tokens, each followed by an observation."""
    parts = [part for _ in states for part in ([1, 2], [3])]
    made = make_trajectory([5], *parts[:-1], group_id=group, sample_id=sample, rewards=[0.0] * len(states))
    left = iter(states)
    segments = [evolve(s, state=next(left)) if s.kind is SegmentKind.ACTION else s for s in made.segments]
    return evolve(made, segments=tuple(segments))


@given(STATES.filter(bool))
def test_turns_have_the_same_number_where_their_states_are_the_same(
    episodes: list[tuple[int, list[int | None]]],
) -> None:
    trajectories = [played(group, sample, states) for sample, (group, states) in enumerate(episodes)]
    found, batch = TurnStates.of(trajectories), pack(trajectories)
    assert ((found.ids_N >= 0) == batch.action_mask_N).all()
    numbers = found.ids_N[batch.action_mask_N].view(-1, 2)
    assert (numbers[:, 0] == numbers[:, 1]).all()
    turns = [(group, state) for group, states in episodes for state in states]
    for i, (_, state) in enumerate(turns):
        for j, (_, other) in enumerate(turns[:i]):
            assert bool(numbers[i, 0] == numbers[j, 0]) == (state is not None and state == other)
    shared = [state is not None and turns.count((group, state)) > 1 for group, state in turns]
    assert found.shared_share == sum(shared) / len(shared)
