"""Writes sampled texts for people to read."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from rollgrad.application.rollouts.groups import RolloutGroup

log = structlog.get_logger(__name__)

LINE_BREAKS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters that JSON allows in a text, but that some tools take for the end of a line."""


class SampleWriter:
    """Appends the first `count` samples of each step to the JSONL file `path`: prompt, response, label, reward. A file
    that cannot be written is reported once, and does not stop the run."""

    def __init__(self, path: Path, decode: Callable[[Sequence[int]], str], count: int) -> None:
        self._path = path
        self._decode = decode
        self._count = count

    def __call__(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes `count` samples of `groups`."""
        samples = [(group, t) for group in groups for t in group.trajectories][: self._count]
        if not samples:
            return
        try:
            # UTF-8 has no lone halves of surrogate pairs; backslashreplace writes them as JSON's escapes.
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                for group, trajectory in samples:
                    line = {
                        "step": step,
                        "prompt": group.prompt.text,
                        "response": self._decode(trajectory.token_ids_T[trajectory.prompt_length :].tolist()),
                        "label": str(group.prompt.label),
                        "reward": trajectory.reward,
                        "stop_reason": trajectory.stop_reason.value,
                    }
                    file.write(json.dumps(line, ensure_ascii=False).translate(LINE_BREAKS) + "\n")
        except Exception as error:  # a label whose text raises, a full disk: training continues without the log
            self._count = 0
            log.warning("no more samples are written", path=str(self._path), error=repr(error))
