"""A teacher reads more that is told a reply of the group which passed."""

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.application.learning.teacher_prompts import ToldOfReplies, told_by_rows
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.testing.agent_executor import make_trajectory


def tell(prompt: Prompt, passed: str | None, feedback: str | None) -> tuple[int, ...] | None:
    """A teacher reads the prompt, a reply that passed, and 7 with feedback; it teaches whatever it is told."""
    if passed is None and feedback is None:
        return None
    return (*prompt.token_ids, *map(int, (passed or "").split()), *([] if feedback is None else [7, int(feedback)]))


TOLD = ToldOfReplies(
    tell=tell,
    decode=lambda token_ids: " ".join(map(str, token_ids)),
    pass_threshold=0.5,
)


def group_of(number: int, scores: list[float]) -> RolloutGroup:
    """A group whose samples reply their own number, in reverse order."""
    samples = [
        evolve(make_trajectory([1, number], [100 + i, 9], group_id=number, sample_id=10 * number + i), score=score)
        for i, score in enumerate(scores)
    ]
    prompt = Prompt(token_ids=(1, number), text="?")
    return RolloutGroup(group_id=number, prompt=prompt, trajectories=tuple(samples[::-1]))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.4, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=3))
def test_each_rollout_is_taught_by_the_first_other_one_that_passed(scores: list[list[float]]) -> None:
    found = TOLD([group_of(number, own) for number, own in enumerate(scores)])
    wanted = {}
    for number, own in enumerate(scores):
        for sample in range(len(own)):
            others = [i for i, score in enumerate(own) if score >= 0.5 and i != sample]
            if others:
                wanted[number, 10 * number + sample] = (1, number, 100 + others[0], 9)
    assert found == wanted


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5]), st.booleans()), min_size=1, max_size=5))
def test_what_the_reward_says_of_a_rollout_that_did_not_pass_is_told_too(judged: list[tuple[float, bool]]) -> None:
    group = group_of(3, [score for score, _ in judged])
    words = {30 + i: str(50 + i) if has else None for i, (_, has) in enumerate(judged)}
    group = evolve(group, trajectories=tuple(evolve(t, feedback=words[t.sample_id]) for t in group.trajectories))
    wanted = {}
    for sample, (score, has) in enumerate(judged):
        others = [i for i, (other, _) in enumerate(judged) if other >= 0.5 and i != sample]
        said = [7, 50 + sample] if has and score < 0.5 else []
        if others or said:
            wanted[3, 30 + sample] = (1, 3, *([100 + others[0], 9] if others else []), *said)
    assert TOLD([group]) == wanted


def test_rows_tell_all_rollouts_of_their_prompt_or_none() -> None:
    plain, other = group_of(0, [0.0, 1.0]), group_of(1, [1.0])
    assert told_by_rows([plain, other]) is None
    taught = evolve(plain, prompt=evolve(plain.prompt, teacher_token_ids=(7, 8)))
    assert told_by_rows([taught, other]) == {(0, 0): (7, 8), (0, 1): (7, 8), (1, 10): (1, 1)}
