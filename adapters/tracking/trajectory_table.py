"""A table of rollouts: a row for each branch, with lists that have an entry for each of its tokens.

docs/trajectories.md says what each column means. Does not own: files (`trajectories`).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
from attrs import field, frozen

from rollgrad.adapters.chat.pictures import named_images
from rollgrad.adapters.system.plain_values import as_utf8, is_json
from rollgrad.adapters.tracking.trajectory_files import HIDDEN_TOKEN
from rollgrad.adapters.tracking.trajectory_schema import SHOWN, TOKEN_NUMBERS, schema
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.trajectory import NO_VERSION, SegmentKind, Trajectory

if TYPE_CHECKING:
    import pyarrow

HIDDEN = "***"

UNFINISHED = "\ufffd"
"""Character that a tokenizer writes for a token with only some of the bytes of a character."""

PROMPT, ACTION, OBSERVATION = range(3)
"""Authors of tokens, in the order of `SegmentKind`."""

Spans = Callable[[str], Sequence[tuple[int, int]]]


@frozen
class TokenText:
    """Text of single tokens. `decode` returns the text of token ids, special tokens included."""

    decode: Callable[[Sequence[int]], str]
    _known: dict[int, str] = field(factory=dict)

    def of(self, token: int) -> str:
        """Returns the text of one token inside a text: at the start of one, some tokenizers leave a space out."""
        if token not in self._known:
            self._known[token] = self.decode([token, token])[len(self.decode([token])) :]
        return self._known[token]

    def split(self, tokens_N: Any, starts_S: Any) -> tuple[Any, list[str]]:
        """Returns an index for each token, and the texts that the indices are of. Joined, the texts of a sequence are
        its text: of tokens that share a character, the first has all of it."""
        unique, index_N = numpy.unique(tokens_N, return_inverse=True)
        texts = [self.of(int(token)) for token in unique]
        partial_N = numpy.array([UNFINISHED in text for text in texts], dtype=bool)[index_N]
        before_N = numpy.concatenate(([False], partial_N[:-1]))
        before_N[starts_S] = False
        beginnings = numpy.flatnonzero(partial_N & ~before_N)
        empty = len(texts)
        texts.append("")
        known: dict[tuple[int, ...], int] = {}
        for start in beginnings.tolist():
            stop = start + 1
            while stop < len(tokens_N) and partial_N[stop] and before_N[stop]:
                stop += 1
            index_N[start + 1 : stop] = empty
            together = tuple(tokens_N[start:stop].tolist())
            if together not in known:  # a script whose characters are of several tokens repeats them, too
                known[together] = len(texts)
                texts.append(self.decode(together))
            index_N[start] = known[together]
        return index_N.astype(numpy.int32), texts


def trajectory_table(
    kind: str,
    step: int,
    groups: Sequence[RolloutGroup],
    batch: RolloutBatch | None,
    *,
    text: TokenText,
    plain: Callable[[Sequence[int]], str],
    secrets: Spans,
) -> "pyarrow.Table":
    """Returns the rows of all trajectories of `groups`, in order, and then of their failed episodes.

    Args:
        kind: `update` or `evaluation`.
        step: updates of the run after which these rollouts are learned from, or were evaluated.
        groups: the rollouts.
        batch: a sequence for each of their trajectories; None without any.
        text: text of tokens.
        plain: returns the text of token ids without special tokens.
        secrets: returns the parts (start, stop) of a text that must not be written.
    """
    import pyarrow as pa

    played = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    shared = {id(group): _of_group(group, secrets) for group in groups}
    rows = [shared[id(group)] | _row(group, t, plain, secrets) for group, t in played]
    _number_branches(rows)
    columns: dict[str, Any] = {}
    if batch is not None:
        columns = _token_columns(batch, text, secrets)
        if columns["token_advantage"] is not None:
            _add_advantages(rows, batch, columns["token_advantage"])
    rows += [shared[id(group)] | _failed(group, failure, secrets) for group in groups for failure in group.failures]
    made = {}
    for name, column in zip(schema().names, schema(), strict=True):
        if not name.startswith("token"):
            made[name] = pa.array([{"kind": kind, "step": step, **row}.get(name) for row in rows], type=column.type)
        elif batch is None or columns.get(name) is None:
            made[name] = pa.nulls(len(rows), column.type)
        else:
            made[name] = _lists(columns[name], batch, len(rows), column.type.value_type)
    return pa.table(made, schema=schema())


def _number_branches(rows: Iterable[dict[str, Any]]) -> None:
    """Numbers the branches of each rollout, in the column `branch`."""
    branches: dict[tuple[int, int], int] = {}
    for row in rows:
        rollout = row["group_id"], row["sample_id"]
        row["branch"] = branches[rollout] = branches.get(rollout, -1) + 1


def _add_advantages(rows: Iterable[dict[str, Any]], batch: RolloutBatch, advantages_N: Any) -> None:
    """Adds the mean advantage of each row's action tokens, in the column `advantage`."""
    mask_N = batch.action_mask_N.cpu().numpy()
    for row, start, length in zip(rows, _starts(batch).tolist(), batch.lengths_S.tolist(), strict=True):
        actions = advantages_N[start : start + length][mask_N[start : start + length]]
        row["advantage"] = float(actions.mean()) if len(actions) else None


def _lists(values: Any, batch: RolloutBatch, rows: int, value_type: Any) -> Any:
    """Returns a column with the values of each sequence's tokens, and null in the rows after the sequences."""
    import pyarrow as pa

    offsets = [*_starts(batch).tolist(), *[None] * (rows - len(batch)), batch.token_count]
    if isinstance(values, numpy.ndarray):  # numbers that were not found are NaN there, and null here
        values = pa.array(values, type=value_type, from_pandas=True)
    return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values)


def _row(
    group: RolloutGroup, trajectory: Trajectory, plain: Callable[[Sequence[int]], str], secrets: Spans
) -> dict[str, Any]:
    versions = trajectory.versions_T[trajectory.versions_T != NO_VERSION]
    response = _text(plain(trajectory.token_ids_T[trajectory.prompt_length :].tolist()), secrets)
    return {
        "sample_id": trajectory.sample_id,
        "role": trajectory.role or None,
        "response": response,
        "response_start": response[:SHOWN],
        "reward": trajectory.reward,
        "score": trajectory.score,
        "reward_parts": _numbers(trajectory.reward_parts),
        "metrics": _numbers(trajectory.metrics),
        "answer": _said(trajectory.answer, secrets),
        "feedback": _said(trajectory.feedback, secrets),
        "stop_reason": trajectory.stop_reason.value,
        "grammars": _grammars(trajectory, secrets),
        "seconds": group.seconds.get(trajectory.sample_id),
        "turns": sum(segment.kind is SegmentKind.ACTION for segment in trajectory.segments),
        "prompt_tokens": trajectory.prompt_length,
        "action_tokens": trajectory.action_length,
        "version_first": int(versions.min()),
        "version_last": int(versions.max()),
    }


def _grammars(trajectory: Trajectory, secrets: Spans) -> str | None:
    """Returns the grammars of actions, by the place of their first token, as JSON; None without any."""
    found = {str(segment.start): segment.grammar for segment in trajectory.prescribed}
    return json.dumps(_plain(found, secrets), ensure_ascii=False) if found else None


def _failed(group: RolloutGroup, failure: Any, secrets: Spans) -> dict[str, Any]:
    return {
        "sample_id": failure.sample_id,
        "failure": failure.kind.value,
        "failure_message": _text(failure.message, secrets),
        "seconds": group.seconds.get(failure.sample_id),
    }


def _of_group(group: RolloutGroup, secrets: Spans) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "group_id": group.group_id,
        "datasource": _text(prompt.datasource, secrets),
        "prompt": _text(prompt.text, secrets),
        "messages": json.dumps(_plain(named_images(prompt.messages), secrets), ensure_ascii=False)
        if prompt.messages
        else None,
        "label": None if prompt.label is None else _label(prompt.label, secrets),
        "baseline": group.baseline,
        "source": _source(prompt, secrets),
    }


def _source(prompt: Prompt, secrets: Spans) -> str:
    """Returns label and row of a prompt as JSON; what JSON cannot hold (pictures, dates) is left out."""
    row = {str(name): value for name, value in prompt.metadata.items() if is_json(value)}
    return json.dumps(_plain({"label": prompt.label if is_json(prompt.label) else None, "row": row}, secrets))


def _label(label: Any, secrets: Spans) -> str:
    plain = _plain(label, secrets)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any, secrets: Spans) -> Any:
    """Returns a value as JSON has it, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_text(str(key), secrets): _plain(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, secrets) for item in value]
    return _text(str(value), secrets)


def without_secrets(text: str, secrets: Spans) -> str:
    """Returns a text with `HIDDEN` in the places of its secrets."""
    for start, stop in reversed(secrets(text)):
        text = f"{text[:start]}{HIDDEN}{text[stop:]}"
    return text


def _text(text: str, secrets: Spans) -> str:
    """Returns a text without its secrets; UTF-8 has no lone halves of surrogate pairs, which become escapes."""
    return as_utf8(without_secrets(text, secrets))


def _said(text: str | None, secrets: Spans) -> str | None:
    return None if text is None else _text(str(text), secrets)


def _numbers(named: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(str(name), float(value)) for name, value in named.items()]


def _starts(batch: RolloutBatch) -> Any:
    return batch.starts_S.cpu().numpy()


def _token_columns(batch: RolloutBatch, text: TokenText, secrets: Spans) -> dict[str, Any]:
    """Returns the columns of tokens, sequences end to end; None for those that the batch lacks."""
    import pyarrow as pa

    def numbers(name: str) -> Any:
        column = getattr(batch, name)
        return None if column is None else column.detach().cpu().numpy()

    tokens_N, starts_S, lengths_S = numbers("tokens_N").astype(numpy.int32), _starts(batch), numbers("lengths_S")
    index_N, texts = text.split(tokens_N, starts_S)
    hidden, empty = len(texts), len(texts) + 1
    for start, length in zip(starts_S.tolist(), lengths_S.tolist(), strict=True):
        pieces = [texts[index] for index in index_N[start : start + length].tolist()]
        spans = secrets("".join(pieces))
        ends = numpy.cumsum([len(piece) for piece in pieces]) if spans else ()
        for first, last in spans:
            within = range(
                start + int(numpy.searchsorted(ends, first, side="right")),
                start + int(numpy.searchsorted(ends, last, side="left")) + 1,
            )
            tokens_N[within.start : within.stop] = HIDDEN_TOKEN
            index_N[within.start], index_N[within.start + 1 : within.stop] = hidden, empty
    kinds_N = numpy.full(len(tokens_N), OBSERVATION, dtype=numpy.int8)
    kinds_N[numbers("action_mask_N")] = ACTION
    kinds_N[numbers("positions_N") < numpy.repeat(numbers("prompt_lengths_S"), lengths_S)] = PROMPT
    written = [as_utf8(text) for text in (*texts, HIDDEN, "")]
    return {
        "token": tokens_N,
        "token_text": pa.DictionaryArray.from_arrays(pa.array(index_N), pa.array(written)),
        "token_kind": kinds_N,
        "token_turn": numbers("turn_ids_N").astype(numpy.int16),
        "token_version": numbers("versions_N").astype(numpy.int32),
        **{name: numbers(column) for name, column in TOKEN_NUMBERS.items()},
        "token_clipped": numbers("clipped_N"),
    }
