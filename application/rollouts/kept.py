"""Groups of a rollout as they stand in a training state: nested mappings, lists, numbers, texts and tensors."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from attrs import asdict, fields
from torch import Tensor

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.trajectory import Segment, SegmentKind, Trajectory


def group_state(group: RolloutGroup) -> dict[str, Any]:
    """Returns all of a group but its prompt, which the stream of prompts deals again, its failures, which were
    counted when it was played, and how long it took."""
    left_out = fields(RolloutGroup).prompt, fields(RolloutGroup).failures, fields(RolloutGroup).seconds
    state: dict[str, Any] = asdict(
        group, filter=lambda attribute, _: attribute not in left_out, value_serializer=_plain
    )
    return state


def group_of_state(state: Mapping[str, Any], prompt: Prompt) -> RolloutGroup:
    """Returns the group that `group_state` described.

    Raises:
        KeyError, TypeError, ValueError: it described none.
    """
    return RolloutGroup(**{**state, "prompt": prompt, "trajectories": tuple(map(_trajectory, state["trajectories"]))})


def _plain(_: Any, __: Any, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    # A number of numpy's, such as an environment may report, is no plain data for who reads the state.
    return value.item() if hasattr(value, "item") and not isinstance(value, Tensor) else value


def _trajectory(state: Mapping[str, Any]) -> Trajectory:
    segments = tuple(Segment(**{**segment, "kind": SegmentKind(segment["kind"])}) for segment in state["segments"])
    return Trajectory(**{**state, "segments": segments, "stop_reason": StopReason(state["stop_reason"])})
