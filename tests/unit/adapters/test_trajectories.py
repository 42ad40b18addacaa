"""The store of trajectories: each token with its numbers, no secret, bounded, and never in the way of a run."""

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import structlog
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rollgrad.adapters.tracking import trajectories
from rollgrad.adapters.tracking.trajectories import BYTES_PER_GIB, ParquetTrajectories
from rollgrad.adapters.tracking.trajectory_files import read_trajectories, step_of, trajectory_files
from rollgrad.adapters.tracking.trajectory_schema import schema
from rollgrad.adapters.tracking.trajectory_table import TokenText
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.errors import DataError
from rollgrad.entrypoints.redaction import secret_spans
from rollgrad.entrypoints.run_directory import keep_trajectories
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from tests.example_runs import rollouts

CODEC = FakeChatCodec()
PROMPT = CODEC.encode("Is é in café? ")


def group(number: int, *replies: str, label: Any = "yes", prompt: Sequence[int] = PROMPT) -> RolloutGroup:
    played = tuple(
        make_trajectory(
            prompt,
            [*CODEC.encode(reply), EOS],
            group_id=number,
            sample_id=10 * number + index,
            rewards=[index],
            version=3,
            reward_parts={"format": index},
        )
        for index, reply in enumerate(replies)
    )
    return RolloutGroup(
        group_id=number,
        prompt=Prompt(token_ids=tuple(prompt), text=CODEC.decode(prompt), label=label),
        trajectories=played,
        seconds={10 * number: 1.5},
    )


def learned(*groups: RolloutGroup) -> RolloutBatch:
    batch = pack([trajectory for group in groups for trajectory in group.trajectories])
    mask = batch.action_mask_N
    return evolve(
        batch,
        advantages_N=torch.where(mask, batch.sequence_ids_N - 0.5, 0.0),
        loss_weights_N=mask / mask.sum(),
    )


def store(directory: Path, *, max_gib: float = 1.0, secrets: Sequence[str] = ()) -> ParquetTrajectories:
    return ParquetTrajectories(
        directory / "trajectories", CODEC, max_gib=max_gib, secrets=lambda text: secret_spans(text, secrets)
    )


def written(directory: Path, *groups: RolloutGroup, **settings: Any) -> list[dict[str, Any]]:
    made = store(directory, **settings)
    made.update(1, groups, learned(*groups))
    made.close()
    return list(rollouts(directory, schema().names))


def test_a_row_has_the_rollout_and_each_of_its_tokens(tmp_path: Path) -> None:
    failure = RolloutFailure(kind=FailureKind.REWARD, message="It hung.", group_id=0, sample_id=2)
    first, second, failed = written(tmp_path, evolve(group(0, "yes", "né"), failures=(failure,)))
    assert [path.name for path in trajectory_files(tmp_path)] == ["step-000001.parquet"]
    assert (first["step"], first["kind"], first["group_id"], first["sample_id"], first["branch"]) == (
        *(1, "update"),
        *(0, 0, 0),
    )
    assert (first["prompt"], first["response"], first["label"], first["seconds"]) == (
        "Is é in café? ",
        "yes",
        "yes",
        1.5,
    )
    assert (second["reward"], dict(second["reward_parts"]), second["stop_reason"]) == (1.0, {"format": 1.0}, "stop")
    assert (second["answer"], second["feedback"]) == (None, None)
    assert (second["advantage"], second["version_first"], second["action_tokens"]) == (0.5, 3, 4)
    assert second["token"] == [*PROMPT, *"né".encode(), EOS]
    assert "".join(second["token_text"]) == "Is é in café? né<eos>"
    assert second["token_text"][-4:] == ["n", "é", "", "<eos>"]
    assert second["token_kind"] == [0] * len(PROMPT) + [1] * 4
    assert second["token_turn"][-4:] == [0] * 4
    assert second["token_logprob"][-4:] == [-1.0] * 4
    assert second["token_advantage"][-4:] == [0.5] * 4
    assert second["token_weight"] == [0.0] * len(PROMPT) + [0.125] * 4
    assert second["token_reward"][-1] == 1.0
    assert second["token_trainer_logprob"] is None
    assert (failed["sample_id"], failed["failure"], failed["failure_message"]) == (2, "reward", "It hung.")
    assert failed["token"] is None
    assert failed["reward"] is None


def test_texts_and_tokens_are_compressed_and_numbers_of_rows_plain(tmp_path: Path) -> None:
    """As a list reads all numbers of all files."""
    written(tmp_path, group(0, "yes", "no"))
    found = parquet.ParquetFile(trajectory_files(tmp_path)[0]).metadata.row_group(0)
    columns = [found.column(number) for number in range(found.num_columns)]
    compressed = {column.path_in_schema for column in columns if column.compression == "ZSTD"}
    assert {"response", "messages", "token.list.element", "token_text.list.element"} <= compressed
    assert not {"step", "reward", "reward_parts.key_value.value", "advantage", "turns"} & compressed


def test_each_column_is_documented() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "trajectories.md"
    table = page.read_text(encoding="utf-8").partition("## Columns")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(cells)) == schema().names


def test_branches_and_turns_of_a_rollout_are_told_apart(tmp_path: Path) -> None:
    branches = [make_trajectory([1], [2, 3], [4], [5], sample_id=7), make_trajectory([1, 9], [6], sample_id=7)]
    made = evolve(group(0), trajectories=tuple(branches))
    first, second = written(tmp_path, made)
    assert [first["branch"], second["branch"]] == [0, 1]
    assert first["token_kind"] == [0, 1, 1, 2, 1]
    assert first["token_turn"] == [-1, 0, 0, -1, 1]
    assert second["token_turn"] == [-1, -1, 2]
    assert [first["turns"], second["turns"]] == [2, 1]


def test_an_evaluation_has_no_weights(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.evaluation(0, [group(0, "yes")])
    made.close()
    (row,) = rollouts(tmp_path, schema().names)
    assert (row["kind"], row["step"], row["reward"]) == ("evaluation", 0, 0.0)
    assert row["token_weight"] is None
    assert row["token_advantage"] is None
    assert row["token_text"][-1] == "<eos>"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, EOS), min_size=1, max_size=12), min_size=1, max_size=5))
def test_the_texts_of_tokens_are_the_text_of_their_sequence(sequences: list[list[int]]) -> None:
    """The bytes may be halves of characters, characters of several tokens, and special tokens in between."""
    decode = lambda tokens: CODEC.decode(tokens, special_tokens=True)  # noqa: E731 # a partial is no shorter
    tokens = numpy.array([token for sequence in sequences for token in sequence], dtype=numpy.int32)
    starts = numpy.cumsum([0, *map(len, sequences)])[:-1]
    index, texts = TokenText(decode).split(tokens, starts)
    for start, sequence in zip(starts, sequences, strict=True):
        assert "".join(texts[i] for i in index[start : start + len(sequence)]) == decode(sequence)


def test_a_secret_is_in_no_column(tmp_path: Path) -> None:
    secret = "sk-12345678"
    prompt = CODEC.encode(f"My key is {secret}, and {secret}!")
    hidden = evolve(
        group(0, f"So {secret} it is.", f"Authorization: Bearer abc{secret}", prompt=prompt, label={"key": [secret]}),
        failures=(RolloutFailure(kind=FailureKind.REWARD, message=f"{secret} refused", group_id=0, sample_id=9),),
    )
    said = {"answer": secret, "feedback": f"It tells {secret}."}
    hidden = evolve(hidden, trajectories=tuple(evolve(own, **said) for own in hidden.trajectories))
    first, second, failed = written(tmp_path, hidden, secrets=[secret])
    for row in (first, second, failed):
        assert secret not in json.dumps(row, ensure_ascii=False, default=str)
    assert first["response"] == "So *** it is."
    assert (second["answer"], second["feedback"]) == ("***", "It tells ***.")
    assert first["label"] == '{"key": ["***"]}'
    assert "".join(first["token_text"]) == "My key is ***, and ***!So *** it is.<eos>"
    assert [token for token in first["token"] if token >= 0] == [
        *CODEC.encode("My key is , and !So  it is."),
        EOS,
    ]
    assert second["response"] == "Authorization: Bearer ***"
    assert secret not in CODEC.decode([token for token in second["token"] if token >= 0])
    assert len(first["token_logprob"]) == len(first["token"])


@pytest.mark.parametrize("text", ["<script>\x00\x1b[31m", "\u202edrawkcab", "x" * 100_000, "\ud800 half"])
def test_hostile_texts_are_kept_as_text(tmp_path: Path, text: str) -> None:
    (row,) = written(tmp_path, group(0, "yes", label=text))
    assert row["label"] == text.replace("\ud800", "\\ud800")


def test_the_oldest_updates_are_removed_beyond_the_limit_and_that_is_said_once(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.update(1, [group(0, "yes")], learned(group(0, "yes")))
    made.close()
    size = trajectory_files(tmp_path)[0].stat().st_size
    made = store(tmp_path, max_gib=3.5 * size / BYTES_PER_GIB)  # what an earlier process wrote counts
    with structlog.testing.capture_logs() as events:
        made.evaluation(1, [group(0, "yes")])
        for step in range(2, 7):
            made.update(step, [group(0, "yes")], learned(group(0, "yes")))
        made.close()
    assert [path.name for path in trajectory_files(tmp_path)] == [
        *("eval-000001.parquet", "step-000005.parquet", "step-000006.parquet")
    ]
    (event,) = events
    assert "--logger.trajectories_max_gib" in event["event"]


def test_on_a_full_disk_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(tmp_path)
    made.update(1, [group(0, "yes")], learned(group(0, "yes")))
    made.flush()
    room = 5.5 * trajectory_files(tmp_path)[0].stat().st_size

    def replace(path: Path, content: bytes) -> None:
        if sum(file.stat().st_size for file in trajectory_files(tmp_path)) + len(content) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(content)

    monkeypatch.setattr(trajectories, "replace_file", replace)
    with structlog.testing.capture_logs() as events:
        for step in range(2, 10):
            made.update(step, [group(0, "yes")], learned(group(0, "yes")))
        made.close()
    assert [step_of(path) for path in trajectory_files(tmp_path)] == [6, 7, 8, 9]
    assert [event["event"] for event in events] == [
        "the disk is full: from now on the oldest trajectories are removed"
    ], "and there is room left for others"


def test_a_disk_that_others_have_filled_takes_trajectories_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = iter([True, False])

    def replace(path: Path, content: bytes) -> None:
        if next(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(content)

    monkeypatch.setattr(trajectories, "replace_file", replace)
    made = store(tmp_path)
    with structlog.testing.capture_logs() as events:
        for step in (1, 2):
            made.update(step, [group(0, "yes")], learned(group(0, "yes")))
        made.close()
    assert [step_of(path) for path in trajectory_files(tmp_path)] == [2]
    assert "could not be written" in events[0]["event"]


def test_a_directory_that_was_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    made = store(tmp_path)
    for step in (1, 2):
        made.update(step, [group(0, "yes")], learned(group(0, "yes")))
        made.flush()
        assert [step_of(path) for path in trajectory_files(tmp_path)] == [step]
        shutil.rmtree(tmp_path / "trajectories")
    made.close()


def test_room_is_made_by_the_oldest_updates(tmp_path: Path) -> None:
    made = store(tmp_path)
    for step in range(1, 4):
        made.update(step, [group(0, "yes")], learned(group(0, "yes")))
    made.evaluation(1, [group(0, "yes")])
    made.close()
    size = sum(path.stat().st_size for path in trajectory_files(tmp_path))
    assert not trajectories.make_room(tmp_path, size + 1, 0.5)
    assert len(trajectory_files(tmp_path)) == 4, "none goes in vain"
    assert trajectories.make_room(tmp_path, (tmp_path / "trajectories" / "step-000001.parquet").stat().st_size, 0.5)
    assert len(trajectory_files(tmp_path)) == 3, "no more than it takes"
    assert trajectories.make_room(tmp_path, None, 0.7)
    assert [path.name for path in trajectory_files(tmp_path)] == ["eval-000001.parquet", "step-000003.parquet"]
    assert trajectories.make_room(tmp_path, None, 0.0)
    assert trajectory_files(tmp_path) == []
    assert not trajectories.make_room(tmp_path, None, 0.0)


def test_a_run_that_goes_on_with_a_smaller_limit_removes_no_more_than_it_writes(tmp_path: Path) -> None:
    made = store(tmp_path)
    for step in range(1, 6):
        made.update(step, [group(0, "yes")], learned(group(0, "yes")))
    made.close()
    size = trajectory_files(tmp_path)[0].stat().st_size
    made = store(tmp_path, max_gib=1.5 * size / BYTES_PER_GIB)
    made.update(6, [group(0, "yes")], learned(group(0, "yes")))
    made.close()
    assert [step_of(path) for path in trajectory_files(tmp_path)] == [2, 3, 4, 5, 6]


def test_the_text_of_a_character_is_decoded_once() -> None:
    """In a script whose characters are of several tokens each would else have an entry of its own."""
    decoded: list[Sequence[int]] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(tokens)
        return CODEC.decode(tokens, special_tokens=True)

    tokens = numpy.array([*"éaéaéa".encode()] * 50, dtype=numpy.int32)
    index, texts = TokenText(decode).split(tokens, numpy.array([0]))
    assert "".join(texts[i] for i in index) == "éaéaéa" * 50
    assert len(texts) < 10
    assert len(decoded) < 10


def test_a_codec_is_copied_at_once_and_one_that_cannot_be_costs_the_files_only(tmp_path: Path) -> None:
    """Later another thread samples with it."""

    class Whole(FakeChatCodec):
        copies = 0

        def __deepcopy__(self, memo: Any) -> FakeChatCodec:
            Whole.copies += 1
            if Whole.copies == 2:
                raise TypeError("cannot pickle a lock")
            return FakeChatCodec()

    ParquetTrajectories(tmp_path / "trajectories", Whole(), max_gib=1.0).close()
    assert Whole.copies == 1
    with structlog.testing.capture_logs() as events:
        made = ParquetTrajectories(tmp_path / "trajectories", Whole(), max_gib=1.0)
        made.update(1, [group(0, "yes")], learned(group(0, "yes")))
        made.close()
    assert [event["error"] for event in events] == ["cannot pickle a lock"]
    assert trajectory_files(tmp_path) == []


def test_a_limit_of_nothing_writes_nothing(tmp_path: Path) -> None:
    assert written(tmp_path, group(0, "yes"), max_gib=0.0) == []
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_named_once_and_counted(tmp_path: Path) -> None:
    (tmp_path / "trajectories").write_text("a file in the place of the directory")
    made = store(tmp_path)
    with structlog.testing.capture_logs() as events:
        for step in range(1, 4):
            made.update(step, [group(0, "yes")], learned(group(0, "yes")))
        made.close()
        made.close()
    first, last = events
    assert first["path"].endswith("step-000001.parquet")
    assert "exists" in first["error"]
    assert last["files"] == 3


def test_a_label_whose_text_raises_costs_its_file_only(tmp_path: Path) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError("no text")

    made = store(tmp_path)
    with structlog.testing.capture_logs() as events:
        made.update(1, [group(0, "yes", label=Broken())], learned(group(0, "yes")))
        made.update(2, [group(0, "yes")], learned(group(0, "yes")))
        made.close()
    assert [path.name for path in trajectory_files(tmp_path)] == ["step-000002.parquet"]
    assert [event["error"] for event in events] == ["no text"]


def test_a_continued_run_keeps_earlier_steps_and_nothing_that_a_killed_writer_left(tmp_path: Path) -> None:
    made = store(tmp_path)
    for step in (1, 2, 3):
        made.update(step, [group(0, "yes")], learned(group(0, "yes")))
        made.evaluation(step, [group(0, "yes")])
    made.close()
    (tmp_path / "trajectories" / ".step-000004.parquet.new").write_bytes(b"half")
    keep_trajectories(tmp_path, until=2)
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names == [f"{kind}-00000{step}.parquet" for kind in ("eval", "step") for step in (1, 2)]
    keep_trajectories(tmp_path / "none", until=2)


def test_all_is_on_the_disk_after_a_flush(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.flush()
    made.update(1, [group(0, "yes")], learned(group(0, "yes")))
    made.flush()
    assert len(trajectory_files(tmp_path)) == 1
    made.close()


def test_a_broken_file_and_one_of_another_version_are_refused_in_a_sentence(tmp_path: Path) -> None:
    written(tmp_path, group(0, "yes"))
    (path,) = trajectory_files(tmp_path)
    table = read_trajectories(path)
    parquet.write_table(table.replace_schema_metadata({"rollgrad.trajectories": "9"}), path)
    with pytest.raises(DataError, match="version 9, and this rollgrad reads 1"):
        read_trajectories(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_trajectories(path)
    assert "\n" not in str(caught.value)
