"""Writes sampled texts for people to read."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.system.plain_values import row_as_utf8
from rollgrad.adapters.tracking.line_file import LineFile
from rollgrad.adapters.tracking.trajectory_table import Spans, without_secrets
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.episodes.trajectory import Trajectory

log = structlog.get_logger(__name__)

LINE_BREAKS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters that JSON allows in a text, but that some tools take for the end of a line."""


class SampleWriter:
    """Appends the first `count` samples of each step to the JSONL file `path`: prompt, response, label, reward, without
    secrets; and tells them to `tell`. While the disk is full they wait in memory (`LineFile`). Samples whose texts
    cannot be made are reported once, and are the last; nothing stops the run."""

    def __init__(
        self,
        path: Path,
        decode: Callable[[Sequence[int]], str],
        count: int,
        secrets: Spans = lambda text: (),
        tell: Callable[[int, Sequence[Mapping[str, Any]]], None] | None = None,
    ) -> None:
        self._path = path
        self._file = LineFile(path)
        self._decode = decode
        self._count = count
        self._secrets = secrets
        self._tell = tell

    def __call__(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes `count` samples of `groups`."""
        samples = [(group, t) for group in groups for t in group.trajectories][: self._count]
        if not samples:
            return
        try:
            lines = [self._line(step, group, trajectory) for group, trajectory in samples]
            self._file.append(*(json.dumps(line, ensure_ascii=False).translate(LINE_BREAKS) for line in lines))
        except Exception as error:  # a label whose text raises: training continues without the log
            self._count = 0
            log.warning("no more samples are written", path=str(self._path), error=repr(error))
            return
        if self._tell is not None:
            self._tell(step, [*map(row_as_utf8, lines)])  # no tracker can send lone halves of surrogate pairs

    def close(self) -> None:
        """Writes the samples that wait; idempotent."""
        self._file.close()

    def _line(self, step: int, group: RolloutGroup, trajectory: Trajectory) -> dict[str, Any]:
        response = self._decode(trajectory.token_ids_T[trajectory.prompt_length :].tolist())
        return {
            "step": step,
            "prompt": without_secrets(group.prompt.text, self._secrets),
            "response": without_secrets(response, self._secrets),
            "label": without_secrets(str(group.prompt.label), self._secrets),
            "reward": trajectory.reward,
            "stop_reason": trajectory.stop_reason.value,
        }
