"""Variables that a cluster is started with hide GPUs, by Ray's own code; its processes are watched."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
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


def test_sigterm_does_what_it_did_before_ray_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's handlers, of which one is C++, print a trace, abort, or end with status 1, until a run heeds signals."""
    init, found = StartsDaemons.init, signal.getsignal(signal.SIGTERM)

    def handling(self: StartsDaemons, *given: Any, **settings: Any) -> None:
        init(self, *given, **settings)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ray's"))

    monkeypatch.setattr(StartsDaemons, "init", handling)
    try:
        for before in (signal.SIG_DFL, signal.SIG_IGN, lambda *_: None):
            signal.signal(signal.SIGTERM, before)
            with started(tmp_path, monkeypatch) as (_, opened):
                assert signal.getsignal(signal.SIGTERM) is before
                opened.close()
    finally:
        signal.signal(signal.SIGTERM, found)


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
    monkeypatch.setattr(session, "_found", str)
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


@contextmanager
def answering(first: bytes | None) -> Iterator[int]:
    """The port of a server that greets each client by `first`; None leaves the connection open, and says nothing."""

    def serve() -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                if first is not None:
                    connection.sendall(first)
                    connection.shutdown(socket.SHUT_WR)

    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in kept:
                connection.close()


@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize(
    ("first", "says"),
    [
        (None, "127.0.0.1:[0-9]+ takes connections, but has not answered for 0.2 s"),
        (b"", "what answers at 127.0.0.1:[0-9]+ is not Ray"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers at 127.0.0.1:[0-9]+ is not Ray"),
    ],
    ids=["silent", "closes", "another server"],
)
def test_a_server_that_is_no_ray_is_told_at_once(
    first: bytes | None, says: str, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would ask it again and again, for a quarter of an hour."""
    import ray

    monkeypatch.setattr(session, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(ray, "init", lambda **settings: pytest.fail("Ray asks"))
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    with answering(first) as port:
        address = f"127.0.0.1:{port}"
        if by_variable:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigurationError, match=f"where no Ray cluster answers .*{says}"):
            RaySession("auto" if by_variable else address, cpus=1)


def test_a_server_of_ray_s_protocol_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    import ray

    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **settings: asked.append(settings["address"]))
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        RaySession(address, cpus=1)
    finally:
        server.stop(None).wait()
    assert asked == [address]
