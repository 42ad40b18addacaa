"""Variables that a cluster is started with hide GPUs, by Ray's own code; its processes are watched."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.models.ray.rank_worker import begin_workers
from rollgrad.adapters.ray import session
from rollgrad.adapters.ray.session import VARIABLES, RaySession, require_raylet
from rollgrad.adapters.system.stop_signals import heeding_signals
from rollgrad.domain.errors import ConfigurationError, LostProcessError, WorkerError


@pytest.mark.parametrize(("own", "visible"), [([], ""), (["3"], "3"), (["3", "5"], "3,5")], ids=str)
def test_a_process_sees_the_gpus_that_it_has_and_no_others(
    own: list[str], visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without any would take NCCL for tensors that are on the CPU."""
    import ray
    from ray._private.utils import set_visible_accelerator_ids

    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": own})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    set_visible_accelerator_ids()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


class StartsDaemons:
    """Ray, as far as a session calls it; its processes of its own are programs that sleep under their names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.started: list[subprocess.Popen[bytes]] = []
        self._connected = False

    def is_initialized(self) -> bool:
        return self._connected

    def init(self, **settings: Any) -> None:
        self._connected = True
        for name in session.DAEMONS:
            shutil.copy(shutil.which("sleep") or "sleep", self._directory / name)
            self.started.append(subprocess.Popen([self._directory / name, "600"]))

    def shutdown(self) -> None:
        self._connected = False
        for process in self.started:
            process.kill()
            process.wait()


@contextmanager
def started(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StartsDaemons, RaySession]]:
    ray = StartsDaemons(directory)
    monkeypatch.setattr(session, "ray_module", lambda: ray)
    monkeypatch.setattr(session, "send_users_classes_whole", lambda cloudpickle: None)
    monkeypatch.setattr(ray, "cloudpickle", None, raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    try:
        yield ray, RaySession(None, cpus=1)
    finally:
        ray.shutdown()


@pytest.mark.parametrize("number", range(len(session.DAEMONS)))
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_the_death_of_a_process_of_rays_own_is_told_and_ends_the_run(
    number: int, end: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run starts again (`LostProcessError`), unless a scheduler ends all processes of a job."""

    async def run() -> None:
        ray.started[number].send_signal(end)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)

    with capture_logs() as logs, started(tmp_path, monkeypatch) as (ray, opened):
        require_raylet()
        assert asyncio.run(heeding_signals(run()))[1] == signal.SIGTERM
        kind = LostProcessError if end == signal.SIGKILL else WorkerError
        monkeypatch.setattr(ray, "remote", lambda worker: None, raising=False)
        with pytest.raises(kind) if session.DAEMONS[number] == "raylet" else nullcontext():
            begin_workers([], threads=1)
        with pytest.raises(WorkerError, match=f"{session.DAEMONS[number]}.*start again with --ckpt.resume") as told:
            opened.close()
        assert type(told.value) is kind
        assert all(process.poll() is not None for process in ray.started)
        require_raylet()
        opened.close()
    (line,) = [line for line in logs if line["log_level"] == "error"]
    assert (line["process"], line["pid"]) == (session.DAEMONS[number], ray.started[number].pid)


@pytest.mark.parametrize("by_others", [False, True])
def test_a_session_that_is_closed_tells_nothing(
    by_others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as logs, started(tmp_path, monkeypatch) as (ray, opened):
        (watching,) = [thread for thread in threading.enumerate() if thread.name == "ray-daemons"]
        (ray.shutdown if by_others else opened.close)()
        watching.join(60)
        assert not watching.is_alive()
    assert not logs


def test_without_a_run_that_heeds_signals_none_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler, which it sets in each program, would end it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("it is sent"))
    try:
        with capture_logs() as logs, started(tmp_path, monkeypatch) as (ray, opened):
            (watching,) = [thread for thread in threading.enumerate() if thread.name == "ray-daemons"]
            ray.started[0].kill()
            watching.join(60)
            with pytest.raises(LostProcessError):
                opened.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [line["process"] for line in logs] == [session.DAEMONS[0]]


@pytest.mark.parametrize(
    ("address", "token", "mode", "says", "says_not"),
    [
        (None, True, None, "Ray did not start on this machine (no room): /tmp/ray/", "cluster.address"),
        ("auto", False, None, "where no Ray cluster answers (no room): start one", "RAY_AUTH_MODE"),
        ("auto", True, None, "set RAY_AUTH_MODE=token if one is there", "did not start"),
        ("auto", True, "token", "where no Ray cluster answers (no room): start one", "RAY_AUTH_MODE"),
    ],
)
def test_who_gets_no_ray_is_told_what_may_be_the_reason(
    address: str | None,
    token: bool,
    mode: str | None,
    says: str,
    says_not: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`ray start` asks for a token where it finds one, which earlier runs that started a Ray of their own have made."""

    class Unreachable(StartsDaemons):
        cloudpickle = None

        def init(self, **settings: Any) -> None:
            raise ConnectionError("no room")

    monkeypatch.setattr(session, "ray_module", lambda: Unreachable(tmp_path))
    monkeypatch.setattr(session, "send_users_classes_whole", lambda cloudpickle: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").touch()
    with pytest.raises(ConfigurationError) as caught:
        RaySession(address, cpus=1)
    assert says in str(caught.value)
    assert says_not not in str(caught.value)
