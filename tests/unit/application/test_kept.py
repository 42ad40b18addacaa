"""Groups of a training state are plain data, whatever numbers an environment reported."""

import io

import numpy as np
import pytest
import torch
from attrs import evolve

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.kept import group_of_state, group_state
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.top_logprobs import TopLogprobs
from rollgrad.testing.agent_executor import make_trajectory


@pytest.mark.parametrize("number", [np.int64(3), np.float32(0.5), np.float64(0.25), np.bool_(True), 3, 0.5, True])
def test_numbers_of_any_library_are_read_back(number: object) -> None:
    trajectory = evolve(make_trajectory([1, 2], [3, 4]), metrics={"number": number})
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1, 2), text="a"), trajectories=(trajectory,))
    file = io.BytesIO()
    torch.save(group_state(group), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    read = group_of_state(state, group.prompt).trajectories[0]
    assert read.metrics == {"number": number}
    assert isinstance(read.metrics["number"], int | float)


def test_images_are_kept_once_and_those_of_the_prompt_dealt_again() -> None:
    def image(digest: str) -> Image:
        return Image(digest=digest, data=digest.encode(), tensors={"pixels": torch.full((2, 3), float(digest))})

    dealt, answered = PlacedImage(image=image("1"), start=0, stop=1), PlacedImage(image=image("2"), start=1, stop=2)
    trajectories = [
        evolve(make_trajectory([1, 2], [3, 4], sample_id=sample), images=(dealt, answered)) for sample in range(2)
    ]
    prompt = Prompt(token_ids=(1, 2), text="a", images=(dealt,))
    group = RolloutGroup(group_id=0, prompt=prompt, trajectories=tuple(trajectories))
    file = io.BytesIO()
    torch.save(group_state(group), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert [*state["images"]] == ["2"]
    for read in group_of_state(state, prompt).trajectories:
        assert read.images == (dealt, answered)
        assert read.images[0].image is dealt.image
        assert read.images[1].image.data == b"2"
        torch.testing.assert_close(read.images[1].image.tensors["pixels"], torch.full((2, 3), 2.0))


def test_grammars_of_replies_are_kept() -> None:
    trajectory = make_trajectory([1, 2], [3, 4])
    prompt, action = trajectory.segments
    followed = evolve(trajectory, segments=(prompt, evolve(action, grammar="start: /[a-z]+/")))
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1, 2), text="a"), trajectories=(followed,))
    read = group_of_state(group_state(group), group.prompt)
    assert [segment.grammar for segment in read.trajectories[0].prescribed] == ["start: /[a-z]+/"]


def test_states_and_answers_are_kept() -> None:
    trajectory = make_trajectory([1, 2], [3, 4])
    prompt, action = trajectory.segments
    told = evolve(trajectory, segments=(prompt, evolve(action, state=-(2**63))), answer="7")
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1, 2), text="a"), trajectories=(told,))
    read = group_of_state(group_state(group), group.prompt)
    assert read.trajectories[0].segments[1].state == -(2**63)
    assert read.answers == ["7"]


def test_likely_tokens_are_kept() -> None:
    top_logprobs = TopLogprobs.of([[(3, -0.5), (5, -1.0)], [(4, -0.25)]])
    told = evolve(make_trajectory([1, 2], [3, 4]), top_logprobs=top_logprobs)
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1, 2), text="a"), trajectories=(told,))
    file = io.BytesIO()
    torch.save(group_state(group), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    (kept,) = state["trajectories"]
    former = {**kept, "likeliest": kept["top_logprobs"]}
    del former["top_logprobs"]  # as states of earlier versions have it
    for saved in (state, {**state, "trajectories": [former]}):
        read = group_of_state(saved, group.prompt).trajectories[0].top_logprobs
        assert read is not None
        assert [*read] == [*top_logprobs]


def test_experts_of_tokens_are_kept() -> None:
    experts_TLK = torch.arange(8, dtype=torch.uint8).view(4, 1, 2)
    routed = evolve(make_trajectory([1, 2], [3, 4]), experts_TLK=experts_TLK)
    group = RolloutGroup(group_id=0, prompt=Prompt(token_ids=(1, 2), text="a"), trajectories=(routed,))
    file = io.BytesIO()
    torch.save(group_state(group), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    read = group_of_state(state, group.prompt).trajectories[0]
    assert read.experts_TLK is not None
    assert torch.equal(read.experts_TLK, experts_TLK)


def test_groups_of_states_of_earlier_versions_are_read() -> None:
    prompt = Prompt(token_ids=(1, 2), text="a")
    group = RolloutGroup(group_id=0, prompt=prompt, trajectories=(make_trajectory([1, 2], [3, 4]),))
    state = group_state(group)
    former = {name: value for name, value in state.items() if name != "images"}
    (trajectory,) = state["trajectories"]
    former["trajectories"] = [
        {"multimodal": None, **{name: value for name, value in trajectory.items() if name != "images"}}
    ]
    assert group_of_state(former, prompt).trajectories[0].images == ()
