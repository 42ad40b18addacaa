"""Writes sampled texts for people to read."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rollgrad.application.rollout import RolloutGroup


class SampleWriter:
    """Appends the first `count` samples of each step to the JSONL file `path`: prompt, response, label, reward."""

    def __init__(self, path: Path, decode: Callable[[Sequence[int]], str], count: int) -> None:
        self._path = path
        self._decode = decode
        self._count = count

    def __call__(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes `count` samples of `groups`."""
        samples = [(group, t) for group in groups for t in group.trajectories][: self._count]
        with self._path.open("a", encoding="utf-8") as file:
            for group, trajectory in samples:
                line = {
                    "step": step,
                    "prompt": group.prompt.text,
                    "response": self._decode(trajectory.token_ids_T[trajectory.prompt_length :].tolist()),
                    "label": str(group.prompt.label),
                    "reward": trajectory.reward,
                    "stop_reason": trajectory.stop_reason.value,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
