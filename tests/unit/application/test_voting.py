"""Rewards by a vote among the samples of a prompt."""

from collections import Counter

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.voting import voted
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.testing.agent_executor import make_trajectory

ANSWERS = st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7)


@given(ANSWERS, st.randoms())
def test_the_answer_of_most_earns_1_wherever_it_stands(answers: list[str | None], random: st.DataObject) -> None:
    """The first sample decides between several with as many votes; whatever was earned before is replaced."""
    samples = [
        [
            evolve(made, answer=answer, score=0.5, reward_parts={"old": 1.0})
            for made in (
                make_trajectory([1], [2], [8], [3], group_id=0, sample_id=sample, rewards=[0.25, 0.5]),
                make_trajectory([1], [4], group_id=0, sample_id=sample, rewards=[0.125]),
            )[: 2 - sample % 2]
        ]
        for sample, answer in enumerate(answers)
    ]
    order = list(samples)
    random.shuffle(order)  # type: ignore[attr-defined]
    prompt = Prompt(token_ids=(1,), text="?")
    branches = tuple(branch for sample in order for branch in sample)
    found = voted(RolloutGroup(group_id=0, prompt=prompt, trajectories=branches))
    votes = Counter(answer for answer in answers if answer is not None)
    elected = next((answer for answer in answers if answer and votes[answer] == max(votes.values())), None)
    for sample in found.samples:
        earned = float(elected is not None and answers[sample[0].sample_id] == elected)
        wanted = [[0.0] * len(branch.segments) for branch in sample]
        wanted[-1][-1] = earned
        assert [[s.reward for s in branch.segments] for branch in sample] == wanted
        assert {branch.score for branch in sample} == {earned}
        assert not any(branch.reward_parts for branch in sample)
    assert [(t.sample_id, len(t)) for t in found.trajectories] == [(t.sample_id, len(t)) for t in branches]
