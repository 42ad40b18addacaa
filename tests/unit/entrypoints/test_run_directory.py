"""A run's directory: one run at a time, logs that are continued whatever they hold, and its settings."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.system.profile import StepProfiler
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.samples import SampleWriter
from rollgrad.adapters.tracking.tracked_run import TrackedRun
from rollgrad.adapters.tracking.trajectories import ParquetTrajectories, make_room
from rollgrad.adapters.weights.disk import Disk
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ckpt import CheckpointConfig, Resume
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.errors import CheckpointError, DataError
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.entrypoints.cli.rescore import own_settings
from rollgrad.entrypoints.composition.outputs import make_profiler, make_reply_log, make_sample_log
from rollgrad.entrypoints.config_io import load_config
from rollgrad.entrypoints.description import settings_file
from rollgrad.entrypoints.named_paths import check_model
from rollgrad.entrypoints.reporting import report_aside, report_run
from rollgrad.entrypoints.run_directory import (
    alone,
    bring_best_back,
    keep_best_apart,
    keep_steps,
    output_problem,
    remove_run,
    write_config,
)
from rollgrad.entrypoints.run_record import RunRecord
from rollgrad.testing.metric_sink import FakeRunTracker
from tests import kept_rollouts

WAIT_SECONDS = 200.0
HOLD = """
import sys, time
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.entrypoints.run_directory import alone

with alone(CheckpointConfig(output_dir=sys.argv[1])):
    print("here", flush=True)
    time.sleep(1000)
"""


def holder(directory: Path) -> "subprocess.Popen[str]":
    """Another process that has the directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def test_of_two_runs_at_once_the_second_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Also by its directory of states; a lock ends with its process, however that ends."""
    first = CheckpointConfig(output_dir=str(tmp_path / "out"))
    process = holder(tmp_path / "out")
    try:
        for second in (first, CheckpointConfig(output_dir=str(tmp_path / "b"), state_dir=first.output_dir)):
            with pytest.raises(CheckpointError) as caught, alone(second):
                pytest.fail("two runs in one directory")
            said = str(caught.value)
            assert "another run is writing" in said
            assert f"process {process.pid} on " in said
            assert "\n" not in said
            assert ("--ckpt.state_dir is" in said) == (second is not first)
        with alone(CheckpointConfig(output_dir=str(tmp_path / "b"))):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_SECONDS)
    for _ in range(2):
        with alone(first):
            pass


def test_two_runs_of_one_process_do_not_share_a_directory_either(tmp_path: Path) -> None:
    ckpt = CheckpointConfig(output_dir=str(tmp_path))
    with alone(ckpt), pytest.raises(CheckpointError, match=rf"process {os.getpid()} "), alone(ckpt):
        pytest.fail("two runs in one directory")
    with alone(CheckpointConfig(output_dir=str(tmp_path), state_dir=str(tmp_path / "." / "x" / ".."))):
        pass


def test_a_directory_that_was_removed_is_locked_again_but_not_if_another_run_has_begun_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever removes the directory of a run that goes on removes its lock, and may begin another run there."""
    out = tmp_path / "out"
    ckpt, store = CheckpointConfig(output_dir=str(out)), LocalCheckpointStore(out)
    with alone(ckpt):
        store.save_state({"step": 1}, "model")
        assert "removed" not in "".join(capsys.readouterr())
        shutil.rmtree(out)
        store.save_state({"step": 2}, "model")
        assert "the directory was removed while the run goes on" in "".join(capsys.readouterr())
        with pytest.raises(CheckpointError, match="another run is writing"), alone(ckpt):
            pytest.fail("two runs in one directory")
        shutil.rmtree(out)
        process = holder(out)
        try:
            with pytest.raises(CheckpointError, match="another run writes there now"):
                store.save_state({"step": 3}, "model")
            assert [path.name for path in out.iterdir()] == [".lock"]
        finally:
            process.kill()
            process.wait(WAIT_SECONDS)
    with alone(ckpt):
        pass


async def profiled(profile: StepProfiler) -> None:
    for step in (1, 2):
        async with profile(step):
            pass


def test_nothing_of_a_run_whose_directory_another_one_has_taken_reaches_the_files_of_that(tmp_path: Path) -> None:
    """Its metrics wait in memory and are lost with its end; it makes no room for itself by removing the other's."""
    out = tmp_path / "out"
    sink, rollouts = (
        JsonlSink(out / "metrics.jsonl"),
        ParquetTrajectories(out / "trajectories", kept_rollouts.CODEC, max_gib=1),
    )
    with alone(CheckpointConfig(output_dir=str(out))):
        sink.log(1, {"reward/mean": 1.0})
        shutil.rmtree(out)
        sink.log(2, {"reward/mean": 2.0})
        assert json.loads((out / "metrics.jsonl").read_text())["step"] == 2, "nobody else is there"
        shutil.rmtree(out)
        process = holder(out)
        try:
            theirs = {".lock": (out / ".lock").read_bytes()}
            for name in ("metrics.jsonl", "trajectories/step-000001.parquet"):
                theirs[name] = b'{"step": 0, "reward/mean": 0.0}\n'
                (out / name).parent.mkdir(exist_ok=True)
                (out / name).write_bytes(theirs[name])
            with capture_logs() as events:
                sink.log(3, {"reward/mean": 3.0})
                rollouts.evaluation(2, [kept_rollouts.group(0, {"yes": 1.0})])
                rollouts.close()
                config = RLConfig(ckpt=CheckpointConfig(output_dir=str(out)), train=TrainConfig(profile_steps=1))
                asyncio.run(profiled(make_profiler(config)))
                assert report_run(out, "mine") is None
                report_aside(out, "mine")
                for write in (
                    lambda: make_room(out, None, 0.0),
                    lambda: Disk(out / "weights")(cast("PolicyModel", None), [], 1),
                    lambda: TrackedRun(project="a", name="a", directory=out, settings={}).id_in("wandb"),
                ):
                    with pytest.raises(CheckpointError, match="another run writes there now"):
                        write()
                sink.close()
            found = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
            assert {name: path.read_bytes() for name, path in found.items()} == theirs
            assert sum("another run writes there now" in str(event) for event in events) == 5
            assert events[-1]["event"] == "metrics.jsonl lacks the last lines of the run"
        finally:
            process.kill()
            process.wait(WAIT_SECONDS)


FORKING = """
import os, signal, sys
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.entrypoints.run_directory import alone

with alone(CheckpointConfig(output_dir=sys.argv[1])):
    if os.fork():
        signal.pause()
    else:
        print("here", flush=True)
        sys.stdin.read()
"""


def test_a_child_that_outlives_its_run_holds_no_lock(tmp_path: Path) -> None:
    """A process that was forked has a copy of the lock, which would hold it when its parent is killed."""
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "here\n"
        parent.kill()
        parent.wait(WAIT_SECONDS)
        with alone(CheckpointConfig(output_dir=str(tmp_path))):
            pass
    finally:
        parent.kill()
        parent.stdin.close()  # which ends the child


def test_what_cannot_be_locked_is_said(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    ckpt = CheckpointConfig(output_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"\.lock cannot be opened"), alone(ckpt):
        pytest.fail("no lock")


def test_a_file_system_without_locks_is_written_after_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import errno
    import fcntl

    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with alone(CheckpointConfig(output_dir=str(tmp_path))):
        assert "make sure that no other run writes there" in capsys.readouterr().out


# Logs.

BROKEN = (
    b"",
    b'{"step": 3, "reward/me',
    bytes(4096),
    b"\xff\xfe",
    b"[1, 2]",
    b"null",
    b"7",
    b'"step"',
    b'{"step": null}',
    b'{"step": Infinity}',
    b'{"step": NaN}',
    b'{"step": ' + b"1" * 5001 + b"}",
    b"[" * 100_000,
    b'{"a": ' * 100_000,
    b"\xe2\x80\xa8",
)
"""Lines that no run writes, or not to their end."""
TEXTS = ("\u2028", "\u2029", "\x85", "\x0b\x0c\x1c\x1d\x1e", "\r\n", "\ud800", "\0", "日本語", '"}\n{"step": 9}')
"""Texts that a prompt, a reply or a label may hold."""


def test_logs_are_continued_whatever_they_hold(tmp_path: Path) -> None:
    """Half a line, zeros after a power loss, foreign lines, all that tools take for a line's end."""
    log = tmp_path / "samples.jsonl"
    tracker = FakeRunTracker()
    write = SampleWriter(log, lambda tokens: "".join(TEXTS), 1, tell=tracker.samples)
    prompt = Prompt(token_ids=(1,), text="".join(TEXTS), label="".join(TEXTS))
    for step in range(1, 5):
        write(step, [group(prompt)])
    assert [step for step, _ in tracker.sampled] == [1, 2, 3, 4]
    (sample,) = tracker.sampled[0][1]
    assert sample["response"] == "".join(TEXTS).replace("\ud800", "\\ud800"), "which can be sent"
    whole = log.read_bytes()
    lines = whole.split(b"\n")[:-1]
    assert [json.loads(line)["prompt"] for line in lines] == ["".join(TEXTS)] * 4
    assert len(whole.decode().splitlines()) == 4, "whatever reads it by lines"
    for index in range(100):
        mixed = list(lines) + random.Random(index).sample(BROKEN, 4)
        random.Random(index).shuffle(mixed)
        ordered = [line for line in mixed if line in lines]
        log.write_bytes(b"\n".join(mixed))
        keep_steps(log, until=3)
        assert log.read_bytes() == b"".join(line + b"\n" for line in ordered if json.loads(line)["step"] <= 3)
    for line in BROKEN:
        log.write_bytes(line)
        keep_steps(log, until=3)
        assert not log.exists()


def test_a_log_that_has_nothing_to_remove_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n')
    before = log.stat()
    keep_steps(log, until=2)
    assert log.stat() == before
    keep_steps(log, until=1)
    assert log.read_text() == '{"step": 1}\n'


def group(prompt: Prompt) -> RolloutGroup:
    from tests.fakes.pipeline import make_run

    run = make_run(Path("/nonexistent"), steps=1)
    run.train()
    return evolve(run.sampled[0][1][0], prompt=prompt)


def test_samples_have_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345678")
    told = "the key sk-12345678."
    codec: Any = SimpleNamespace(decode=lambda tokens: told)
    config = RLConfig(ckpt=CheckpointConfig(output_dir=str(tmp_path)), logger=LoggerConfig(log_samples=1))
    tracker = FakeRunTracker()
    judged = group(Prompt(token_ids=(1,), text=told, label=told))
    judged = evolve(judged, trajectories=tuple(evolve(own, feedback=told) for own in judged.trajectories))
    make_sample_log(config, codec, tracker)(1, [judged])
    assert "12345678" not in str(tracker.sampled)
    assert tracker.sampled
    (line,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert {line[name] for name in ("prompt", "response", "label", "feedback")} == {"the key ***."}


def test_replies_of_an_evaluation_have_failures_and_no_secrets_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise ValueError

    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345678")
    path = tmp_path / "replies.jsonl"
    codec: Any = SimpleNamespace(decode=lambda tokens: "the key sk-12345678.")
    write = make_reply_log(RLConfig(), codec, path)
    failed = RolloutFailure(kind=FailureKind.REWARD, message="by sk-12345678", group_id=0, sample_id=9)
    write(evolve(group(Prompt(token_ids=(1,), text="a", label="b")), failures=(failed,)))
    *replies, failure = map(json.loads, path.read_text().splitlines())
    assert {line["response"] for line in replies} == {"the key ***."}
    assert (failure["sample_id"], failure["failure"]) == (9, "by ***")
    assert [failure[name] for name in ("datasource", "prompt", "label")] == [replies[0]["datasource"], "a", "b"]
    for label in (Unprintable(), "b"):
        write(group(Prompt(token_ids=(1,), text="a", label=label)))
    write.close()
    assert len(path.read_text().splitlines()) == len(replies) + 1
    assert capsys.readouterr().out.count("no more samples are written") == 1


def test_a_command_that_reads_a_run_says_where_one_is(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").touch()
    with pytest.raises(DataError, match=r"holds no run: did you mean .*/first\?"):
        own_settings(tmp_path, tmp_path)
    with pytest.raises(DataError, match=r"/first/config\.yaml is missing"):
        own_settings(tmp_path / "first", tmp_path)


def test_a_file_of_a_model_is_taken_for_none(tiny_model_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"is no directory: did you mean --actor\.model {tiny_model_dir}\?"):
        check_model("actor.model", str(tiny_model_dir / "model.safetensors"))


def test_a_name_of_several_directories_is_none_of_the_hub() -> None:
    with pytest.raises(CheckpointError, match=r"actor\.model is 'runs/sft/model', which is no directory: name a model"):
        check_model("actor.model", "runs/sft/model")


def test_adapters_are_no_model(tmp_path: Path) -> None:
    """Those that rollgrad saves are below the model that has them merged."""
    alone, beside = tmp_path / "alone", tmp_path / "model" / "adapter"
    for place in (alone, beside):
        place.mkdir(parents=True)
        (place / "adapter_config.json").write_text("{}")
    (beside.parent / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"and not the model: .* rollgrad merge-lora --adapter {alone}, and"):
        check_model("actor.model", str(alone))
    with pytest.raises(CheckpointError, match=rf"adapters to a model .* did you mean --actor\.model {beside.parent}\?"):
        check_model("actor.model", str(beside))


def test_samples_that_cannot_be_written_wait_and_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = group(Prompt(token_ids=(1,), text="a"))
    write = SampleWriter(tmp_path / "missing" / "samples.jsonl", lambda tokens: "", 1)
    for step in (1, 2):
        write(step, [played])
    (tmp_path / "missing").mkdir()
    write(3, [played])
    write.close()
    said = capsys.readouterr().out
    assert said.count("samples.jsonl cannot be written") == said.count("samples.jsonl is written again") == 1
    lines = (tmp_path / "missing" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_report_is_made_of_what_can_be_read(tmp_path: Path) -> None:
    from rollgrad.adapters.tracking.metrics_file import read_metrics

    good = [b'{"step": 1, "reward/mean": 0.5}', b'{"step": 2, "reward/mean": null}', b'{"step": 3, "reward/mean": 1}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*BROKEN, good[0], *BROKEN, *good[1:], *BROKEN]))
    assert read_metrics(tmp_path / "metrics.jsonl") == {"reward/mean": {1: 0.5, 3: 1.0}}


# What a run is.


def test_the_settings_of_a_run_read_back_without_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2-hunter2")
    config = RLConfig()
    config.reward.remote_url = "http://me:pass@host/score"
    config.agent.system_prompt = "Say hunter2-hunter2: *** \x85"
    config.data.chat_template_kwargs = {"api_token": "hunter3", "thinking": True}
    config.train.seed = 7
    write_config(tmp_path, settings_file(config))
    text = (tmp_path / "config.yaml").read_text()
    assert not any(secret in text for secret in ("hunter", "me:pass"))
    assert "rollgrad 0." in text
    assert "torch 2." in text
    read = load_config(tmp_path / "config.yaml")
    assert read.train.seed == 7
    assert read.reward.remote_url == "http://***@host/score"
    assert read.agent.system_prompt == "Say ***: *** \x85"
    assert read.data.chat_template_kwargs == {"api_token": "***", "thinking": True}


def test_settings_of_somebody_else_stay(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# mine\ntrain: {seed: 3}\n")
    for seed in (1, 2):
        write_config(tmp_path, f"train: {{seed: {seed}}}\n")
    assert (tmp_path / "config.yaml").read_text().startswith("# mine")
    assert load_config(tmp_path / "config.run.yaml").train.seed == 2


def test_a_state_of_either_kind_tells_of_a_run_and_goes_with_it(tmp_path: Path) -> None:
    ckpt = CheckpointConfig(output_dir=str(tmp_path))
    assert output_problem(ckpt) is None
    for name in ("training_state.pt", "training_state_3"):
        path = tmp_path / name
        path.touch() if name.endswith(".pt") else path.mkdir()
        assert "continue it with --ckpt.resume" in str(output_problem(ckpt))
        assert output_problem(CheckpointConfig(output_dir=str(tmp_path), resume=Resume.ALWAYS)) is None
        remove_run(ckpt)
        assert list(tmp_path.iterdir()) == []


def test_a_run_whose_training_states_are_gone_is_not_started_anew(tmp_path: Path) -> None:
    """The disk of ckpt.state_dir may not be mounted where a scheduler starts the job again."""
    states = tmp_path / "states"
    ckpt = CheckpointConfig(output_dir=str(tmp_path), state_dir=str(states), resume=Resume.AUTO)
    (states / "training_state_12").mkdir(parents=True)
    with RunRecord(tmp_path, learning={"steps": 20}, states=states):
        (tmp_path / "metrics.jsonl").write_text('{"step": 14}\n')
    assert output_problem(ckpt) is None
    states.rename(tmp_path / "elsewhere")
    problem = str(output_problem(ckpt))
    assert f"{states} holds no training state, though the run in {tmp_path} saved one after step 12" in problem
    assert output_problem(evolve(ckpt, overwrite=True)) is None
    assert output_problem(evolve(ckpt, state_dir=str(tmp_path / "elsewhere"))) is None


def test_a_best_model_that_was_kept_apart_by_a_run_that_was_killed_is_brought_back(tmp_path: Path) -> None:
    def make(content: str) -> None:
        (tmp_path / "best").mkdir()
        for path in (tmp_path / "best" / "weights", tmp_path / "best.state.json"):
            path.write_text(content)

    make("of step 3")
    assert keep_best_apart(tmp_path, 3) == tmp_path / "best_3"
    assert keep_best_apart(tmp_path, 3) is None, "there is none any more"
    make("by another evaluation")
    assert keep_best_apart(tmp_path, 3) is None, "the older one stays"
    for _ in range(2):
        bring_best_back(tmp_path, 3)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "best.state.json"]
        assert {(tmp_path / name).read_text() for name in ("best/weights", "best.state.json")} == {"of step 3"}


def test_the_profile_of_a_run_goes_with_it_and_a_run_of_that_name_stays(tmp_path: Path) -> None:
    ckpt = CheckpointConfig(output_dir=str(tmp_path), overwrite=True)
    trace = tmp_path / "profile" / "step-000002" / "run.json.gz"
    for other in (None, tmp_path / "profile" / "metrics.jsonl"):
        trace.parent.mkdir(parents=True)
        trace.write_bytes(b"")
        if other is not None:
            other.write_text('{"step": 1}\n')
        remove_run(ckpt)
        assert list(tmp_path.rglob("*")) == ([] if other is None else [other.parent, other])


def test_rollouts_alone_are_a_run_too(tmp_path: Path) -> None:
    """Somebody kept them, and removed what is large."""
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step-000007.parquet").write_bytes(b"")
    problem = output_problem(CheckpointConfig(output_dir=str(tmp_path)))
    assert problem is not None
    assert "holds a run of 7 steps" in problem
    (tmp_path / "trajectories" / "step-000007.parquet").rename(tmp_path / "trajectories" / "step-000001.parquet")
    assert "holds a run of 1 step:" in str(output_problem(CheckpointConfig(output_dir=str(tmp_path))))


def test_what_cannot_be_changed_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 4}\n')

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        keep_steps(tmp_path / "metrics.jsonl", until=3)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_config(tmp_path, "")
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]
