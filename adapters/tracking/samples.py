"""Writes sampled texts for people to read: some of each step, or all of an evaluation."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


class _TextLog:
    """Appends lines of samples to the JSONL file `path`, without secrets. While the disk is full they wait in memory
    (`LineFile`). Samples whose texts cannot be made are reported once, and are the last; nothing stops the run."""

    def __init__(self, path: Path, decode: Callable[[Sequence[int]], str], secrets: Spans) -> None:
        self._path = path
        self._file = LineFile(path)
        self._decode = decode
        self._secrets = secrets
        self._failed = False

    def close(self) -> None:
        """Writes the samples that wait; idempotent."""
        self._file.close()

    def _append(self, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Writes lines; returns those that were made."""
        if self._failed:
            return []
        try:
            made = list(lines)
            if made:
                self._file.append(*(json.dumps(line, ensure_ascii=False).translate(LINE_BREAKS) for line in made))
        except Exception as error:  # a label whose text raises: the run continues without the log
            self._failed = True
            log.warning("no more samples are written", path=str(self._path), error=repr(error))
            return []
        return made

    def _texts(self, group: RolloutGroup, trajectory: Trajectory) -> dict[str, str]:
        """Returns what a sample's line says of its texts."""
        response = self._decode(trajectory.token_ids_T[trajectory.prompt_length :].tolist())
        return self._without_secrets(
            {"prompt": group.prompt.text, "response": response, "label": str(group.prompt.label)}
        )

    def _said(self, text: str | None) -> str | None:
        return None if text is None else without_secrets(str(text), self._secrets)

    def _without_secrets(self, texts: Mapping[str, str]) -> dict[str, str]:
        return {name: without_secrets(text, self._secrets) for name, text in texts.items()}


class SampleWriter(_TextLog):
    """Appends the first `count` samples of each step to the JSONL file `path`: prompt, response, label, reward,
    feedback, stop reason, as `_TextLog` does; and tells them to `tell`."""

    def __init__(
        self,
        path: Path,
        decode: Callable[[Sequence[int]], str],
        count: int,
        secrets: Spans = lambda text: (),
        tell: Callable[[int, Sequence[Mapping[str, Any]]], None] | None = None,
    ) -> None:
        super().__init__(path, decode, secrets)
        self._count = count
        self._tell = tell

    def __call__(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes `count` samples of `groups`."""
        samples = [(group, t) for group in groups for t in group.trajectories][: self._count]
        lines = self._append(
            {
                "step": step,
                **self._texts(group, own),
                "reward": own.reward,
                "feedback": self._said(own.feedback),
                "stop_reason": own.stop_reason.value,
            }
            for group, own in samples
        )
        if lines and self._tell is not None:
            self._tell(step, [*map(row_as_utf8, lines)])  # no tracker can send lone halves of surrogate pairs


class ReplyWriter(_TextLog):
    """Appends all replies of an evaluation to the JSONL file `path`, each prompt's when it is called with them, as
    `_TextLog` does: a line for each branch of an episode, and for each failed episode. `kept_replies.py` reads them;
    docs/metrics.md says what they have."""

    def __init__(
        self, path: Path, decode: Callable[[Sequence[int]], str], model: str, secrets: Spans = lambda text: ()
    ) -> None:
        super().__init__(path, decode, secrets)
        self._model = model

    def __call__(self, group: RolloutGroup) -> None:
        """Writes the replies to a prompt."""
        self._append(self._lines(group))

    def _lines(self, group: RolloutGroup) -> Iterator[dict[str, Any]]:
        of_prompt = {"model": self._model, "group_id": group.group_id}
        source = {"datasource": group.prompt.datasource}
        for sample in group.samples:
            for number, own in enumerate(sample):
                place = {"sample_id": own.sample_id, "branch": number, "branches": len(sample), "role": own.role}
                yield {**of_prompt, **place, **source, **self._texts(group, own), **self._judged(own)}
        asked = {"prompt": group.prompt.text, "label": str(group.prompt.label)}
        for failed in group.failures:
            texts = self._without_secrets({**asked, "failure": failed.message})
            yield {**of_prompt, "sample_id": failed.sample_id, **source, **texts, "failure_kind": failed.kind.value}

    def _judged(self, own: Trajectory) -> dict[str, Any]:
        return {
            "score": own.score,
            "answer": self._said(own.answer),
            "feedback": self._said(own.feedback),
            "stop_reason": own.stop_reason.value,
            "sampled_tokens": own.action_length,
            **{name: {key: float(value) for key, value in told.items()} for name, told in _numbers(own).items()},
        }


def _numbers(own: Trajectory) -> dict[str, Mapping[str, float]]:
    """Returns the numbers of a branch that have names."""
    return {"reward_parts": own.reward_parts, "metrics": own.metrics}
