"""Groups of a training state are plain data, whatever numbers an environment reported."""

import io

import numpy as np
import pytest
import torch
from attrs import evolve

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.kept import group_of_state, group_state
from rollgrad.domain.episodes.prompts import Prompt
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
