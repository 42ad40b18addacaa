"""`rollgrad generate` and `rollgrad score` as a user runs them, with a real (tiny) model."""

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

import rollgrad
from rollgrad.adapters.data import reply_log
from rollgrad.adapters.data.reply_log import RowLog
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, DType
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.application.settings.sections.rollout import Engine, RolloutConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, DataError, EngineError, RewardError
from rollgrad.entrypoints import generation
from rollgrad.entrypoints.cli.main import main
from tests.fakes.model_server import ModelServer

PROMPTS, SAMPLES = 5, 3
REWARD = """
def reward_func(queries, prompts, labels, completions):
    rewards = [None if label == "2" else len(query) + int(label) for query, label in zip(queries, labels)]
    logs = {"long": [len(c) for c in completions]}
    return {"rewards": rewards, "scores": [0.5] * len(labels), "extra_logs": logs, "feedback": ["so so"] * len(labels)}
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"What is {a} plus {a}?", "answer": str(a), "note": "\u2028 two\nlines"} for a in range(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def function(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels, completions):\n    return [len(q) for q in queries]\n")
    return path


def settings(model: Path, data: Path, **rollout: Any) -> RLConfig:
    return RLConfig(
        actor=ActorConfig(model_name_or_path=str(model), dtype=DType.FLOAT32),
        data=DataConfig(prompt_dataset=str(data)),
        rollout=RolloutConfig(**{"n_samples_per_prompt": SAMPLES, "max_new_tokens": 6, **rollout}),
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def tokens(path: Path) -> dict[tuple[int, int], list[int]]:
    return {(row["row"], row["sample"]): row["tokens"] for row in rows(path)}


def test_each_prompt_is_answered(tiny_model_dir: Path, prompts: Path, tmp_path: Path, tiny_tokenizer: Any) -> None:
    out = tmp_path / "replies.jsonl"
    replies = rollgrad.generate(settings(tiny_model_dir, prompts), out, logprobs=True)
    assert (replies.path, replies.rows, replies.made) == (out, PROMPTS * SAMPLES, PROMPTS * SAMPLES)
    written = rows(out)
    assert [(row["row"], row["sample"]) for row in written] == [
        (row, sample) for row in range(PROMPTS) for sample in range(SAMPLES)
    ]
    assert len({tuple(row["tokens"]) for row in written}) > PROMPTS  # samples differ
    assert len({row["seed"] for row in written}) == len(written)
    for row in written:
        assert row["messages"] == [{"role": "user", "content": f"What is {row['row']} plus {row['row']}?"}]
        assert tiny_tokenizer.decode(row["prompt_tokens"]) == row["prompt"]
        assert tiny_tokenizer.decode(row["tokens"], skip_special_tokens=True) == row["completion"]
        assert len(row["logprobs"]) == len(row["tokens"]) <= 6
        assert max(row["logprobs"]) < 0
        assert row["stop_reason"] in ("stop", "length")
        assert (row["model"], row["label"]) == (str(tiny_model_dir), str(row["row"]))
        assert row["metadata"]["note"] == "\u2028 two\nlines"


def test_a_run_that_was_cut_off_is_continued_with_the_same_replies(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resuming comes to the same file, whatever of it is left, and in whatever portions it was made."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "replies.jsonl"
    rollgrad.generate(settings(tiny_model_dir, prompts), whole)
    assert rollgrad.generate(settings(tiny_model_dir, prompts, n_samples_per_prompt=1), out).made == PROMPTS
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[3] + lines[0] + lines[1][:-7])
    replies = rollgrad.generate(settings(tiny_model_dir, prompts, max_concurrent=2), out)
    assert (replies.rows, replies.made) == (PROMPTS * SAMPLES, PROMPTS * SAMPLES - 2)
    assert tokens(out) == tokens(whole)
    assert "an incomplete last line is removed" in capsys.readouterr().err
    before = out.read_bytes()
    assert rollgrad.generate(settings(tiny_model_dir, prompts), out).made == 0
    assert out.read_bytes() == before


def test_a_server_samples(wide_headed_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    server = ModelServer()
    try:
        rollgrad.generate(
            settings(wide_headed_model_dir, prompts, engine=Engine.SERVER, server_urls=(server.url,)), tmp_path / "out"
        )
    finally:
        server.close()
    assert {row["tokens"][0] for row in rows(tmp_path / "out")} == {100}  # which the server counts up from
    assert len(rows(tmp_path / "out")) == PROMPTS * SAMPLES


@pytest.mark.parametrize("processed", [True, False])
def test_log_probs_of_another_distribution_are_not_written(
    processed: bool, wide_headed_model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    server = ModelServer(processed=processed)
    config = settings(wide_headed_model_dir, prompts, engine=Engine.SERVER, server_urls=(server.url,))
    hot = evolve(config, rollout=evolve(config.rollout, temperature=0.5))
    try:
        with capture_logs() as told:
            rollgrad.generate(config, tmp_path / "plain", logprobs=True)  # which both kinds of server tell
        warned = f"the server {server.url} has policy, which is taken for '{wide_headed_model_dir}'"
        assert sum(line["event"].startswith(warned) for line in told) == 1
        if processed:
            rollgrad.generate(hot, tmp_path / "hot", logprobs=True)
        else:
            with pytest.raises(ConfigurationError, match="--logprobs-mode processed_logprobs, or leave --logprobs out"):
                rollgrad.generate(hot, tmp_path / "hot", logprobs=True)
        assert rollgrad.generate(hot, tmp_path / "without").rows == PROMPTS * SAMPLES
    finally:
        server.close()
    assert len(rows(tmp_path / "hot")) == PROMPTS * SAMPLES * processed


def test_a_terminal_shows_how_far_it_is(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    rollgrad.generate(settings(tiny_model_dir, prompts, max_new_tokens=2), tmp_path / "out.jsonl")
    assert "Sampling" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_some_rows_alone_are_answered(tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    rollgrad.generate(settings(tiny_model_dir, prompts), tmp_path / "all.jsonl")
    rollgrad.generate(settings(tiny_model_dir, prompts), tmp_path / "some.jsonl", rows=[4, 1])
    some = tokens(tmp_path / "some.jsonl")
    assert list(some) == [(row, sample) for row in (4, 1) for sample in range(SAMPLES)]
    assert some.items() <= tokens(tmp_path / "all.jsonl").items()


def test_a_file_of_other_replies_is_refused(tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "replies.jsonl"
    config = settings(tiny_model_dir, prompts, max_new_tokens=2)
    rollgrad.generate(config, out)
    before = out.read_bytes()
    with pytest.raises(CheckpointError, match=r"rollout\.temperature \(1\.0, now 0\.5\).*another --output"):
        rollgrad.generate(settings(tiny_model_dir, prompts, max_new_tokens=2, temperature=0.5), out)
    prompts.write_text(prompts.read_text().replace("0 plus 0", "zero plus zero"))
    with pytest.raises(CheckpointError, match=r"differ in prompts "):
        rollgrad.generate(config, out)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("my notes\n")
    with pytest.raises(CheckpointError, match=r"mine\.jsonl is there already"):
        rollgrad.generate(config, mine)
    assert (out.read_bytes(), mine.read_text()) == (before, "my notes\n")


def test_what_was_sampled_before_an_error_is_kept(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollgrad.application.episodes.single_turn import SingleTurnExecutor

    whole, out = tmp_path / "whole.jsonl", tmp_path / "replies.jsonl"
    config = settings(tiny_model_dir, prompts)
    rollgrad.generate(config, whole)
    run = SingleTurnExecutor.run

    async def fails(self: Any, request: Any) -> Any:
        if (request.group_id, request.sample_id) == (3, 1):
            raise EngineError("The engine is gone.")
        return await run(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(SingleTurnExecutor, "run", fails)
        with pytest.raises(EngineError, match="gone"):
            rollgrad.generate(config, out)
    kept = out.read_bytes()
    assert whole.read_bytes().startswith(kept)
    assert len(rows(out)) == 3 * SAMPLES + 1
    rollgrad.generate(config, out)
    assert tokens(out) == tokens(whole)


def test_a_reply_that_cannot_be_sampled_is_written_as_failed(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on; it is sampled again only if that is asked for, with the same result as without the failure."""
    from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine

    whole, out, scored = (tmp_path / name for name in ("whole.jsonl", "replies.jsonl", "scored.jsonl"))
    config = settings(tiny_model_dir, prompts)
    rollgrad.generate(config, whole)
    broken = {row["seed"] for row in rows(whole) if (row["row"], row["sample"]) == (3, 1)}
    generate = EmbeddedEngine.generate

    async def fails(self: Any, request: Any, **keywords: Any) -> Any:
        if request.params.seed in broken:
            raise EngineError("The engine is gone.")
        return await generate(self, request, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedEngine, "generate", fails)
        replies = rollgrad.generate(config, out)
    assert (replies.rows, replies.made, replies.failed) == (PROMPTS * SAMPLES, PROMPTS * SAMPLES, 1)
    failed = [row for row in rows(out) if row["completion"] is None]
    assert [(row["row"], row["sample"], row["failure"]) for row in failed] == [(3, 1, "The engine is gone.")]
    assert failed[0]["prompt"] == rows(whole)[3 * SAMPLES]["prompt"]
    judged = rollgrad.score(config, out, scored, reward=lambda completions: [1.0] * len(completions))
    assert (judged.rows, judged.failed) == (PROMPTS * SAMPLES - 1, 0)  # there is nothing to judge of it
    before = out.read_bytes()
    assert rollgrad.generate(config, out).made == 0
    assert out.read_bytes() == before
    again = rollgrad.generate(config, out, retry_failed=True)
    assert (again.rows, again.made, again.failed) == (PROMPTS * SAMPLES, 1, 0)
    assert tokens(out) == tokens(whole)
    assert rollgrad.score(config, out, scored, reward=lambda completions: [1.0] * len(completions)).made == 1


def test_a_reply_that_cannot_be_judged_is_written_as_failed(tmp_path: Path) -> None:
    """A call that is interrupted and repeated does not judge it again, until that is asked for."""
    source, out, function = tmp_path / "mine.jsonl", tmp_path / "scored.jsonl", tmp_path / "reward.py"
    completions = ["one", "bad", "three"]
    source.write_text("".join(json.dumps({"prompt": "a", "completion": text}) + "\n" for text in completions))
    function.write_text(
        "def reward_func(completions):\n    return [{'one': 3.0, 'three': 5.0}[c] for c in completions]\n"
    )
    config = RLConfig(reward=RewardConfig(function_path=str(function)))
    judged = rollgrad.score(config, source, out)
    assert (judged.rows, judged.made, judged.failed) == (3, 3, 1)
    assert [(row["reward"], "KeyError: 'bad'" in row.get("failure", "")) for row in rows(out)] == [
        (3.0, False),
        (None, True),
        (5.0, False),
    ]
    assert rollgrad.score(config, source, out).made == 0
    function.write_text("def reward_func(completions):\n    return [float(len(c)) + 1 for c in completions]\n")
    with pytest.raises(CheckpointError, match=r"differ in function .* add --retry_failed; .* another --output"):
        rollgrad.score(config, source, out)
    words = ["--input", str(source), "--reward.function_path", str(function), "--output", str(out), "--retry_failed"]
    assert main(["score", *words]) == 0
    assert [(row["row"], row["reward"], "failure" in row) for row in rows(out)] == [
        (0, 3.0, False),  # as it was judged before
        (2, 5.0, False),
        (1, 4.0, False),
    ]
    assert rollgrad.score(config, source, out).made == 0  # the changed function has become the file's


def test_a_disk_too_full_to_remove_failed_rows_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "mine.jsonl", tmp_path / "scored.jsonl"
    source.write_text("".join(json.dumps({"prompt": "a", "completion": text}) + "\n" for text in ("one", "bad")))

    def reward(completions: list[str]) -> list[float]:
        return [{"one": 1.0}[text] for text in completions]

    rollgrad.score(RLConfig(), source, out, reward=reward)
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(reply_log.os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            rollgrad.score(RLConfig(), source, out, reward=reward, retry_failed=True)
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before


def test_a_judge_that_is_down_ends_the_run(tmp_path: Path) -> None:
    """Replies that were judged before are kept, and not judged a second time."""
    source, out, count = tmp_path / "mine.jsonl", tmp_path / "scored.jsonl", 40
    source.write_text('{"prompt": "a", "completion": "b"}\n' * count)
    judged: list[str] = []

    def reward(completions: list[str]) -> list[float]:
        judged.extend(completions)
        if len(judged) > 5:
            raise ConnectionError("The judge is down.")
        return [1.0] * len(completions)

    config = RLConfig(rollout=RolloutConfig(max_concurrent=1))
    with pytest.raises(
        RewardError, match=r"3 episodes failed \(3 reward\), and 2 may .*The judge is down.*again with --retry_failed"
    ):
        rollgrad.score(config, source, out, reward=reward)
    assert [row["reward"] for row in rows(out)] == [1.0] * 5 + [None] * 2
    rest = rollgrad.score(config, source, out, reward=lambda completions: [2.0] * len(completions), retry_failed=True)
    assert (rest.rows, rest.made, rest.failed) == (count, count - 5, 0)


def test_replies_that_always_fail_end_no_call_that_tries_them_alone(tmp_path: Path) -> None:
    """A loop tries them again whenever it goes on."""
    source, out, count = tmp_path / "mine.jsonl", tmp_path / "scored.jsonl", 40
    texts = ["bad" if number < 2 else "good" for number in range(count)]
    source.write_text("".join(json.dumps({"prompt": "a", "completion": text}) + "\n" for text in texts))

    def reward(completions: list[str]) -> list[float]:
        return [{"good": 1.0}[text] for text in completions]

    for made in (count, 2):
        judged = rollgrad.score(RLConfig(), source, out, reward=reward, retry_failed=True)
        assert (judged.rows, judged.made, judged.failed) == (count, made, 2)


def test_nothing_but_failures_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        rollgrad.score(RLConfig(), source, tmp_path / "scored.jsonl", reward=lambda completions: [1 / 0])


def test_a_full_disk_leaves_whole_lines(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "replies.jsonl"
    config = settings(tiny_model_dir, prompts, max_new_tokens=2)
    flush = RowLog.flush

    def full(self: Any) -> None:
        class Full:
            file = self._file

            def write(self, text: bytes) -> int:
                return int(self.file.write(text[: len(text) // 2]))

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

        self._file = Full()
        flush(self)

    with monkeypatch.context() as patch:
        patch.setattr(RowLog, "flush", full)
        with pytest.raises(CheckpointError, match="make room"):
            rollgrad.generate(config, out)
    assert out.read_bytes() == b""
    assert rollgrad.generate(config, out).rows == PROMPTS * SAMPLES


def test_replies_are_judged_as_in_training(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies, out, reward = tmp_path / "replies.jsonl", tmp_path / "scored.jsonl", tmp_path / "reward.py"
    reward.write_text(REWARD)
    words = ["--actor.model_name_or_path", str(tiny_model_dir), "--data.prompt_dataset", str(prompts)]
    sampling = ["--rollout.max_new_tokens", "6", "--rollout.n_samples_per_prompt", "2", "--output", str(replies)]
    assert main(["generate", *words, *sampling]) == 0
    assert main(["score", "--input", str(replies), "--reward.function_path", str(reward), "--output", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{replies}\n{out}\n"
    assert "10 replies judged, 10 in all" in printed.err
    for before, row in zip(rows(replies), rows(out), strict=True):
        assert before.items() <= row.items()
        if row["label"] == "2":
            assert (row["reward"], row["scores"]) == (None, None)  # the function does not apply
        else:
            text = row["completion"] + ("<|im_end|>" if row["stop_reason"] == "stop" else "")
            assert row["reward"] == len(row["prompt"]) + len(text) + int(row["label"])
            assert (row["scores"], row["metrics"]) == (0.5, {"long": len(row["completion"])})
            assert row["feedback"] == "so so"


def test_scoring_is_continued(tiny_model_dir: Path, prompts: Path, tmp_path: Path, function: Path) -> None:
    replies, whole, out = (tmp_path / name for name in ("replies.jsonl", "whole.jsonl", "scored.jsonl"))
    config = settings(tiny_model_dir, prompts)
    rollgrad.generate(config, replies)
    config.reward = RewardConfig(function_path=str(function))
    rollgrad.score(config, replies, whole)
    rollgrad.score(config, replies, out)
    out.write_bytes(out.read_bytes()[:-200])
    config.reward.timeout = 77.0  # what ended it may be mended
    assert rollgrad.score(config, replies, out).made == 1
    assert out.read_bytes() == whole.read_bytes()
    description = out.with_name("scored.jsonl.json")
    older = {name: value for name, value in json.loads(description.read_text()).items() if "step_" not in name}
    description.write_text(json.dumps(older))  # written before those settings existed
    assert rollgrad.score(config, replies, out).made == 0
    description.write_text(json.dumps({name: older[name] for name in older if name != "function"}))
    with pytest.raises(CheckpointError, match=r"differ in function \(null, "):
        rollgrad.score(config, replies, out)
    description.write_text(json.dumps(older))
    function.write_text(function.read_text() + "# another one\n")
    with pytest.raises(CheckpointError, match=r"differ in function "):
        rollgrad.score(config, replies, out)


def test_rewards_of_all_kinds_judge(
    tiny_model_dir: Path, reward_model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    replies = tmp_path / "replies.jsonl"
    config = settings(tiny_model_dir, prompts, n_samples_per_prompt=1)
    rollgrad.generate(config, replies)
    config.reward = RewardConfig(model_name_or_path=str(reward_model_dir))
    rollgrad.score(config, replies, tmp_path / "model.jsonl")
    assert len({row["reward"] for row in rows(tmp_path / "model.jsonl")}) == PROMPTS
    generated = RLConfig(
        actor=config.actor,
        data=DataConfig(prompt_dataset="reasoning_gym:basic_arithmetic", size=3),
        rollout=config.rollout,
    )
    rollgrad.generate(generated, tmp_path / "gym.jsonl")
    rollgrad.score(generated, tmp_path / "gym.jsonl", tmp_path / "judged.jsonl")
    assert [0 <= row["reward"] <= 1 for row in rows(tmp_path / "judged.jsonl")] == [True] * 3


def test_foreign_replies_are_judged(tmp_path: Path) -> None:
    """Texts alone need no model."""
    source, out = tmp_path / "mine.jsonl", tmp_path / "scored.jsonl"
    source.write_text(
        '{"prompt": "2 + 2", "completion": "It is 4", "label": "4"}\n\n{"prompt": "a", "completion": "b"}'
    )
    rollgrad.score(RLConfig(), source, out, reward=lambda completions: [len(text) for text in completions])
    assert [row["reward"] for row in rows(out)] == [7, 1]


def test_a_scheduler_ends_it_as_ctrl_c_does(tmp_path: Path) -> None:
    """Rows that were judged until then are in the file, and the engines are closed."""
    source, out, count = tmp_path / "mine.jsonl", tmp_path / "scored.jsonl", 20
    source.write_text('{"prompt": "a", "completion": "b"}\n' * count)
    config = RLConfig(rollout=RolloutConfig(max_concurrent=1))
    judged: list[int] = []

    def reward(completions: list[str]) -> list[float]:
        judged.append(len(completions))
        if len(judged) == count // 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return [1.0] * len(completions)

    with pytest.raises(KeyboardInterrupt):
        rollgrad.score(config, source, out, reward=reward)
    assert count // 2 - 1 <= len(rows(out)) < count
    assert rollgrad.score(config, source, out, reward=reward).rows == count


def test_null_stands_for_what_is_not_there(tmp_path: Path) -> None:
    """pandas writes it where other rows have a value."""
    source, out = tmp_path / "mine.jsonl", tmp_path / "scored.jsonl"
    absent = ("row", "sample", "messages", "prompt_tokens", "tokens", "stop_reason", "model", "datasource", "metadata")
    source.write_text(json.dumps({"prompt": "a", "completion": "b", "label": None, **dict.fromkeys(absent)}) + "\n")
    rollgrad.score(RLConfig(), source, out, reward=lambda completions: [1.0])
    assert rows(out) == [
        {"row": 0, "sample": 0, "prompt": "a", "completion": "b", "label": None}
        | {"reward": 1.0, "scores": 1.0, "metrics": {}}
    ]


def test_a_large_file_is_judged_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of it is in memory than is judged at once."""
    source, count, at_once = tmp_path / "large.jsonl", 20, 2
    source.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    source.write_text(source.read_text() * count)
    read: list[int] = []
    when_judged: list[int] = []

    def counted(rows: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def reading(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            for row in rows(*arguments, **keywords):
                read.append(row["row"])
                yield row

        return reading

    def reward(completions: list[str]) -> list[float]:
        when_judged.append(len(read))
        return [1.0] * len(completions)

    for name in ("read_rows", "chosen_rows"):
        monkeypatch.setattr(generation, name, counted(getattr(generation, name)))
    config = RLConfig(rollout=RolloutConfig(max_concurrent=at_once))
    assert rollgrad.score(config, source, tmp_path / "scored.jsonl", reward=reward).made == count
    assert when_judged[0] <= count + at_once  # all were looked at before, and none was kept


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"prompt": "a"}\n', r"Line 1 of .* has no text 'completion'"),
        ("{}\n[]\n", r"Line 1 of .* has no text 'prompt'"),
        ('{"prompt": "a", "completion": "b"}\n{"pro\n', r"Line 2 of .* is no JSON"),
        ('{"prompt": "a", "completion": "b", "row": 1, "sample": 0}\n' * 2, r"Line 2 of .* again sample 0 of row 1"),
        ("", "has no rows"),
        ('{"prompt": "a", "completion": "b", "stop_reason": "eos"}\n', r"the stop_reason \"eos\", which is not one of"),
        ('{"prompt": "a", "completion": "b", "prompt_tokens": "ab"}\n', r"which is not a list of token ids"),
        ('{"prompt": "a", "completion": "b", "messages": ["hi"]}\n', r"which is not a list of messages"),
        ('{"prompt": "a", "completion": "b", "row": "x"}\n', r"the row \"x\", which is not a number"),
    ],
)
def test_a_wrong_line_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text(text)
    with pytest.raises(DataError, match=sentence):
        rollgrad.score(RLConfig(), source, tmp_path / "out.jsonl", reward=len)


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--agent.attempts", "2", "--rollout.top_p", "7"]) == 2
    error = capsys.readouterr().err
    for words in ("rollout.top_p", "agent.attempts", "--data.prompt_dataset", "--actor.model_name_or_path", "--output"):
        assert words in error
    assert main(["score", "--output", "x"]) == 2
    error = capsys.readouterr().err
    assert "set --input" in error
    assert "No reward is set" in error


def test_a_reward_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text('{"prompt": "a", "completion": "b"}\n')
    config = RLConfig(reward=RewardConfig(function_path="nowhere.py"))
    with pytest.raises(ConfigurationError, match=r"reward\.function_path is 'nowhere\.py', which is no file"):
        rollgrad.score(config, source, tmp_path / "out.jsonl")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(CheckpointError, match="a directory: name a file in it"):
        rollgrad.score(RLConfig(), source, tmp_path, reward=lambda completions: [1.0])


def test_the_file_that_is_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="which is the file that is read"):
        rollgrad.score(RLConfig(), tmp_path / "a.jsonl", tmp_path / "a.jsonl", reward=len)
