"""A group of processes names a lost one, and its calls meet; each process is a thread, and there is no Ray."""

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollgrad.adapters.models.ray import group_state, rank_worker, worker_group
from rollgrad.adapters.models.ray.group_state import CopiedState
from rollgrad.adapters.models.ray.rank_worker import RankWorker, begin_workers
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.ray import session
from rollgrad.domain.errors import CheckpointError, DataError, LostProcessError, WorkerError

SECONDS = 60.0


class Thread:
    """A process that makes one call after the other on `model`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._calls = ThreadPoolExecutor(1)
        self.call = SimpleNamespace(remote=lambda method, *own: self._calls.submit(getattr(model, method), *own))
        self.listen = SimpleNamespace(remote=lambda: self._calls.submit(lambda: ("here", 1)))
        self.join = SimpleNamespace(remote=lambda *own: self._calls.submit(lambda: id(model) % 1000))


class Threads:
    """Ray, as far as a group calls it; errors are told as they are, where Ray wraps them."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = iter(models)
        self.killed = 0

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_, **__: Thread(next(self._models))))

    def wait(self, references: list["Future[Any]"], timeout: float) -> tuple[list["Future[Any]"], None]:
        done, _ = wait(references, timeout, FIRST_COMPLETED)
        return [reference for reference in references if reference in done][:1], None

    def get(self, reference: "Future[Any]") -> Any:
        return reference.result()

    def kill(self, worker: Thread) -> None:
        self.killed += 1

    def is_initialized(self) -> bool:
        return True


class Model:
    """`gates`: events that its methods share with a test."""

    def __init__(self, **gates: threading.Event) -> None:
        self.gates = gates
        self.left = 3

    def score(self) -> str:
        return "scores"

    def open(self) -> None:
        self.left = 3

    def next(self) -> int | None:
        self.left -= 1
        return self.left or None

    def skip(self) -> None:
        self.gates["skipped"].set()

    def gather(self) -> None:
        assert self.gates["skipped"].wait(SECONDS)


class Dying(Model):
    """Dies in its part of what the first one sends, which then fails at once because the other has left it."""

    def gather(self) -> None:
        assert self.gates["failed"].wait(SECONDS)
        from ray.exceptions import RayActorError

        raise RayActorError

    def score(self) -> str:
        from ray.exceptions import RayActorError

        raise RayActorError


class Left(Model):
    def next(self) -> int | None:
        if (item := super().next()) == 1:
            self.gates["failed"].set()
            raise RuntimeError("Connection closed by peer")
        return item

    def score(self) -> str:
        raise RuntimeError("Connection closed by peer")


class Stuck(Model):
    def score(self) -> str:
        self.gates["end"].wait(SECONDS)
        return "late"


class CutOff(Model):
    """Waits for another process as long as it may, and then fails as gloo does."""

    def score(self) -> str:
        raise RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 120000ms for recv operation")


class Late(CutOff):
    """Does so after the deadline of the call."""

    def score(self) -> str:
        self.gates["end"].wait(0.2)
        return super().score()


class Failing(Model):
    def score(self) -> str:
        raise ValueError("no such row")


class Wrong(Model):
    def score(self) -> str:
        raise DataError("no such image")


class Refusing(Model):
    def score(self) -> str:
        raise CheckpointError("no room")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkerGroup]:
    def group(*models: Model) -> WorkerGroup:
        for module in (rank_worker, worker_group):
            monkeypatch.setattr(module, "ray_module", lambda: threads)
        threads = Threads(models)
        slots: list[Any] = [SimpleNamespace(options=dict, gpus=0.0)] * len(models)
        return WorkerGroup("actor", begin_workers(slots, threads=1), timeout=SECONDS)

    return group


def read(group: WorkerGroup) -> Iterator[list[Any]]:
    return group.read("open", ranks=[0], following="next", rest="skip", others="gather")


def test_a_reading_is_read_to_its_end(make: Callable[..., WorkerGroup]) -> None:
    skipped = threading.Event()
    group = make(Model(skipped=skipped), Model(skipped=skipped))
    assert list(read(group)) == [[2], [1]]
    assert group.all("score") == ["scores", "scores"]


def test_the_process_that_died_is_named_and_not_the_one_that_it_left(make: Callable[..., WorkerGroup]) -> None:
    failed = threading.Event()
    group = make(Left(failed=failed), Dying(failed=failed))
    reading = read(group)
    assert next(reading) == [2]
    with pytest.raises(WorkerError, match=r"Of the 2 processes of actor, rank 1 died while 'next'"):
        next(reading)
    with pytest.raises(WorkerError, match="rank 1 died while 'next'") as told_again:
        group.all("score")
    log = re.escape(f"/logs/worker-*-{group.pids[1]}.err on its machine. Start again with --ckpt.resume auto,")
    assert re.search(log, str(told_again.value))
    group = make(Left(), Dying())
    with pytest.raises(WorkerError, match="rank 1 died while 'score'"):
        group.all("score")
    group = make(Model(), Model(), Dying())
    with pytest.raises(WorkerError, match="rank 2 died while 'score'"):
        group.begin("score", [1, 2])()


def test_nothing_is_put_for_processes_that_are_lost(
    make: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its raylet, whose death has ended them, Ray ends the process that puts."""
    group = make(Model(), Dying())
    with pytest.raises(LostProcessError, match="rank 1 died while 'score'"):
        group.all("score")
    monkeypatch.setattr(group, "put", lambda argument: pytest.fail("it is put"))
    with pytest.raises(LostProcessError, match="rank 1 died while 'score'"):
        group.all("write_state", "directory")
    group = make(Model(), Model())
    monkeypatch.setattr(group, "put", lambda argument: pytest.fail("it is put"))
    monkeypatch.setattr(session, "_without_raylet", [LostProcessError("raylet has died")])
    with pytest.raises(LostProcessError, match="raylet has died"):
        group.all("write_state", "directory")


def test_another_call_ends_a_reading_in_all_processes(make: Callable[..., WorkerGroup]) -> None:
    skipped = threading.Event()
    group = make(Model(skipped=skipped), Model(skipped=skipped))
    reading = read(group)
    next(reading)
    assert group.all("score") == ["scores", "scores"]
    with pytest.raises(WorkerError, match="actor was asked for something else while its weights were on their way"):
        next(reading)
    skipped.clear()
    closed = read(group)
    next(closed)
    closed.close()
    assert skipped.is_set()
    skipped.clear()
    ended = read(group)
    next(ended)
    assert list(read(group)) == [[2], [1]]
    with pytest.raises(WorkerError, match="something else"):
        next(ended)


@pytest.mark.parametrize(
    ("others", "silent"),
    [([Stuck], r"ranks 0, 1 did not answer within 0\.1 s"), ([CutOff, Late], r"rank 0 did not answer within 0\.1 s")],
)
def test_who_does_not_answer_in_time_is_named(
    make: Callable[..., WorkerGroup], others: Sequence[type[Model]], silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not who waited for it, whether that failed before the deadline or after it."""
    monkeypatch.setattr(worker_group, "GRACE_SECONDS", 1.0)
    end = threading.Event()
    group = make(Stuck(end=end), *(model(end=end) for model in others))
    group.timeout = 0.1
    with pytest.raises(LostProcessError, match=silent + " while 'score'"):
        group.all("score")
    end.set()


def test_who_does_not_answer_yet_is_logged(make: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each so many seconds, however long the call may take."""
    monkeypatch.setattr(worker_group, "TELL_SECONDS", 0.1)
    end = threading.Event()
    group = make(Model(), Stuck(end=end))
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 2:
            end.set()

    monkeypatch.setattr(worker_group, "log", SimpleNamespace(info=tell))
    assert group.all("score") == ["scores", "late"]
    assert told[:2] == [f"rank 1 of actor did not answer 'score' yet ({n} s of 60 s)" for n in ("0.1", "0.2")]


def test_processes_that_all_lose_each_other_are_lost_and_one_that_fails_is_named(
    make: Callable[..., WorkerGroup],
) -> None:
    group = make(CutOff(), CutOff())
    with pytest.raises(LostProcessError, match=r"rank 0 failed \(RuntimeError.*Timed out"):
        group.all("score")
    group = make(CutOff(), Failing())
    with pytest.raises(WorkerError, match=r"rank 1 failed \(ValueError: no such row") as told_once:
        group.all("score")
    assert not isinstance(told_once.value, LostProcessError)


def test_an_error_on_purpose_is_raised_as_it_is_and_ends_nothing(
    make: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make(Model(), Refusing())
    monkeypatch.setattr(Threads, "get", lambda self, reference: told(reference))
    with pytest.raises(CheckpointError, match="no room"):
        group.all("score")
    assert group.begin("score", [0])() == ["scores"]


def test_a_process_that_waits_for_one_which_has_failed_is_ended(
    make: Callable[..., WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, and what it computes next would meet what that one waits for; but not one that writes its part of a
    state."""
    monkeypatch.setattr(Threads, "get", lambda self, reference: told(reference))
    monkeypatch.setattr(worker_group, "CAUSE_SECONDS", 0.1)
    end = threading.Event()
    group = make(Stuck(end=end), Wrong())
    with pytest.raises(DataError, match="no such image"):
        group.all("score")
    with pytest.raises(LostProcessError, match=r"rank 1 failed \(DataError: no such image\) while 'score'"):
        group.all("open")
    group = make(Stuck(end=end), Refusing())
    with pytest.raises(CheckpointError, match="no room"):
        group.all("score")
    end.set()
    assert group.all("open") == [None, None]


@pytest.mark.parametrize(("given", "found"), [(None, "1801"), ("5", "5")])
def test_a_process_that_waits_for_another_has_as_long_as_a_call(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(rank_worker, "show_gpus", lambda: None)  # Ray knows them, and there is none
    seen: list[str] = []
    worker = RankWorker(0, 1, torch.get_num_threads(), own_gpu=True)
    assert worker.join("here", 1, 1800.5, lambda **_: seen.append(os.environ[name])) == os.getpid()
    assert seen == [found]


class Training:
    """A group whose processes take nearly as long as they may before they begin to write; and the time."""

    name, size, timeout = "actor", 2, 60.0

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0

    def begin(self, method: str, *_: Any) -> Callable[[], list[Any]]:
        return self.begin_to_write if method == "write_copy" else self.have_written

    def begin_to_write(self) -> list[Any]:
        self.now += 59.9
        return [None, None]

    def have_written(self) -> list[Any]:
        self.asked += 1
        return [True, self.asked > 2]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_copy_has_its_time_from_when_the_processes_begin_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = Training()
    monkeypatch.setattr(group_state, "time", group)
    CopiedState(group).write_files(tmp_path)
    assert group.asked == 3


def told(reference: "Future[Any]") -> Any:
    """Ray's way: the error has what was raised as its `cause`."""
    error = reference.exception()
    if error is None:
        return reference.result()
    wrapped = RuntimeError("in a process")
    wrapped.cause = error  # type: ignore[attr-defined]
    raise wrapped
