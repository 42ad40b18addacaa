"""Groups of a rollout as they stand in a training state: nested mappings, lists, numbers, texts and tensors."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from attrs import asdict, fields
from torch import Tensor

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.top_logprobs import TopLogprobs
from rollgrad.domain.episodes.trajectory import Segment, SegmentKind, Trajectory

FORMER = ("multimodal", "likeliest")
"""Keys in the trajectories of states of earlier versions: one without a value, and a former name of `top_logprobs`."""


def group_state(group: RolloutGroup) -> dict[str, Any]:
    """Returns all of a group but its prompt, which the stream of prompts deals again with its images, its failures,
    which were counted when it was played, and how long it took. Each other image is in it once."""
    own = fields(RolloutGroup)
    left_out = own.prompt, own.failures, own.seconds, fields(Trajectory).images
    state: dict[str, Any] = asdict(
        group, filter=lambda attribute, _: attribute not in left_out, value_serializer=_plain
    )
    for saved, trajectory in zip(state["trajectories"], group.trajectories, strict=True):
        saved["images"] = [[placed.image.digest, placed.start, placed.stop] for placed in trajectory.images]
    dealt = {placed.image for placed in group.prompt.images}
    shown = {placed.image for trajectory in group.trajectories for placed in trajectory.images}
    state["images"] = {
        image.digest: {
            "data": torch.frombuffer(bytearray(image.data), dtype=torch.uint8),
            "tensors": dict(image.tensors),
        }
        for image in shown - dealt
    }
    return state


def group_of_state(state: Mapping[str, Any], prompt: Prompt) -> RolloutGroup:
    """Returns the group that `group_state` described.

    Raises:
        KeyError, TypeError, ValueError: it described none.
    """
    images = {placed.image.digest: placed.image for placed in prompt.images}
    for digest, saved in state.get("images", {}).items():
        images[digest] = Image(digest=digest, data=saved["data"].numpy().tobytes(), tensors=saved["tensors"])
    trajectories = tuple(_trajectory(trajectory, images) for trajectory in state["trajectories"])
    known = {name: value for name, value in state.items() if name != "images"}
    return RolloutGroup(**{**known, "prompt": prompt, "trajectories": trajectories})


def _plain(_: Any, __: Any, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    # A number of numpy's, such as an environment may report, is no plain data for who reads the state.
    return value.item() if hasattr(value, "item") and not isinstance(value, Tensor) else value


def _trajectory(state: Mapping[str, Any], images: Mapping[str, Image]) -> Trajectory:
    segments = tuple(Segment(**{**segment, "kind": SegmentKind(segment["kind"])}) for segment in state["segments"])
    placed = tuple(
        PlacedImage(image=images[digest], start=start, stop=stop) for digest, start, stop in state.get("images", ())
    )
    known = {name: value for name, value in state.items() if name not in FORMER}
    told = state.get("top_logprobs", state.get("likeliest"))
    rebuilt = {
        "segments": segments,
        "stop_reason": StopReason(state["stop_reason"]),
        "images": placed,
        "top_logprobs": None if told is None else TopLogprobs(**told),
    }
    return Trajectory(**{**known, **rebuilt})
