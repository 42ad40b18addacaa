"""Joins a Ray cluster, or starts one on this machine for as long as the run."""

import atexit
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.system.python_file import USER_MODULE
from rollgrad.adapters.system.stop_signals import heeding
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.application.foreign import first_line
from rollgrad.domain.errors import ConfigurationError, LostProcessError, MissingExtraError, WorkerError

CONNECT_SECONDS = 60
"""Longest wait for a connection to a cluster, and for its answer."""

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""First bytes of a client of HTTP/2, by which Ray's processes talk: the preface and a frame of no settings."""
FRAME_KIND, SETTINGS_FRAME = 3, 4
"""Place of a frame's kind in its header, and the kind of the first frame that a server of HTTP/2 sends."""

RAYLET = "raylet"
DAEMONS = ("gcs_server", RAYLET)
"""Processes of Ray's own on this machine, without which no cluster goes on."""

VARIABLES = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",  # a minute, after which Ray ends everybody, is too short to save
    "RAY_worker_niceness": "0",  # Ray would lower the priority of training
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # hides all GPUs from processes that have none
}
"""Environment variables of the processes of a cluster that is started here."""

STARTS = 3
"""Attempts to start a cluster here: Ray gives up after 30 seconds, which may be too few on a busy machine."""

LOGS = "/tmp/ray/session_latest/logs"
"""Directory to which Ray's own processes write, unless it was told another one for temporary files."""
TOKEN = "~/.ray/auth_token"
"""File of the token that a cluster asks for, if its `ray start` has found it; a Ray that starts for a run makes it."""

NO_RAY = "--cluster.enable needs Ray, and so does --num_engines: pip install rollgrad[ray,deepspeed,vllm]."
"""The error where it is not installed."""


log = structlog.get_logger(__name__)

_without_raylet: list[WorkerError] = []
"""The error of a raylet that has died, until its session is closed."""


def ray_module() -> Any:
    """Returns the package `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(NO_RAY) from error
    return ray


def cluster_gpus() -> float:
    """Returns the number of GPUs of the cluster that this process has joined."""
    return float(ray_module().cluster_resources().get("GPU", 0))


def machine() -> str:
    """Returns Ray's id of this process's machine."""
    return str(ray_module().get_runtime_context().get_node_id())


def own_gpus() -> list[str]:
    """Returns the ids of the GPUs that Ray has given this process, in the order of their numbers."""
    devices = ray_module().get_runtime_context().get_accelerator_ids().get("GPU", [])
    return sorted(devices, key=lambda device: (len(device), device))


def show_gpus(devices: Sequence[str] = ()) -> None:
    """Makes this process see the GPUs of these ids alone, without any those that Ray has given it; before the first
    call of CUDA. Ray does so itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, as other trainers want
    it: each process would then see all GPUs of its machine, and take the first."""
    if devices := devices or own_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)


def send_users_classes_whole(cloudpickle: Any) -> None:
    """Makes classes of users' files, such as settings that a loss brings, travel whole: no other process could import
    them before it has read the file."""
    for module in [module for name, module in sys.modules.items() if name.startswith(USER_MODULE)]:
        cloudpickle.register_pickle_by_value(module)


class RaySession:
    """A connection to Ray. An existing connection is used, and not closed.

    Args:
        address: `auto` or host:port of a running cluster; None starts one here.
        cpus: logical CPUs of a cluster that is started here, as many as the run's processes ask for.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigurationError: no cluster answers at `address`.
    """

    lost: WorkerError | None = None
    """Why the cluster that was started here cannot go on; None while it does."""

    def __init__(self, address: str | None, *, cpus: float) -> None:
        ray = ray_module()
        send_users_classes_whole(ray.cloudpickle)
        self._closing = threading.Event()
        self._owned = not ray.is_initialized()
        if not self._owned:
            return
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        before = signal.getsignal(signal.SIGTERM)
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            settings |= {"num_cpus": max(1, round(cpus + 0.5)), "include_dashboard": False}
        try:
            if address is not None:
                _check_answers(_found(address))  # Ray itself would try for a quarter of an hour
            with waiting_for("Ray to start on this machine" if address is None else f"the Ray cluster at {address}"):
                _init(address or "local", settings)
            _handle_by(before)
            if address is None and (daemons := _daemons()):
                atexit.register(self._closing.set)  # which comes before Ray's own end, registered at its import
                threading.Thread(target=self._watch, args=(daemons,), name="ray-daemons", daemon=True).start()
        except (OSError, ValueError, RuntimeError) as error:
            raise _not_there(address, first_line(error)) from error

    def close(self) -> None:
        """Closes the connection, and ends a cluster that was started here; may be called again.

        Raises:
            WorkerError: the cluster was `lost`; only once.
        """
        if self._owned:
            self._closing.set()
            if self.lost is not None:  # nothing else ends what a dead process has left
                _end_children()
            ray_module().shutdown()
            _without_raylet.clear()
            self._owned = False
            if self.lost is not None:
                raise self.lost

    def _watch(self, daemons: Mapping[int, tuple[str, int]]) -> None:
        """Waits until a process of Ray's own ends. If the session is not being closed, says so, and ends the run as
        SIGTERM does: without its raylet Ray ends this process at its next large argument, and without the GCS soon,
        with no word of the run."""
        poll = select.poll()
        for descriptor in daemons:
            poll.register(descriptor, select.POLLIN)
        ended = poll.poll()[0][0]
        told = _was_told_to_end(ended)
        for descriptor in daemons:
            os.close(descriptor)
        if self._closing.is_set() or not ray_module().is_initialized():  # whoever else may have ended Ray
            return
        name, pid = daemons[ended]
        kind = WorkerError if told else LostProcessError
        self.lost = kind(
            f"A process of Ray's own, {name} (process {pid}), has died, without which no process of the run can go on: "
            "start again with --ckpt.resume, which continues from the last training state (--ckpt.state_minutes)."
        )
        log.error(
            "a process of Ray's own has died: the run saves what it can and starts again, unless Ray ends it before; "
            "then --ckpt.resume continues it",
            process=name,
            pid=pid,
        )
        if name == RAYLET:
            _without_raylet.append(self.lost)
        if heeding.is_set():  # else Ray's own handler would end the program
            os.kill(os.getpid(), signal.SIGTERM)


def _handle_by(handler: Any) -> None:
    """Handles SIGTERM as before Ray came: its own handler prints a trace of C++, and may abort, or end with status 1,
    in all the time until a run heeds signals. What Ray has started ends with this process in any case."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _not_there(address: str | None, reason: str) -> ConfigurationError:
    """Returns the error of a cluster that does not answer, or did not start here, where `address` is None."""
    if address is None:
        return ConfigurationError(
            f"Ray did not start on this machine ({reason}): {LOGS} say why; `rollgrad doctor` shows what the machine "
            "has and lacks."
        )
    token = Path(TOKEN)
    asks = "RAY_AUTH_MODE" not in os.environ and token.expanduser().exists()
    return ConfigurationError(
        f"cluster.address is {address!r}, where no Ray cluster answers ({reason}): start one with `ray start --head`, "
        + (f"set RAY_AUTH_MODE=token if one is there, as it asks for the token in {TOKEN}, " if asks else "")
        + "or leave --cluster.address out to run on this machine."
    )


def require_raylet() -> None:
    """Raises an error if the raylet that this process started has died: Ray would end this process at its next large
    argument.

    Raises:
        WorkerError: it has died.
    """
    for error in _without_raylet:
        raise type(error)(str(error))


def _end_children() -> None:
    """Kills Ray's own processes on this machine, and those that they have started."""
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() in DAEMONS:
                for process in [*child.children(recursive=True), child]:
                    process.kill()


def _was_told_to_end(descriptor: int) -> bool:
    """Returns whether a process ended as by SIGTERM, which a scheduler may send to all processes of a job."""
    try:
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # Ray has asked before
        return False
    return end is not None and end.si_status in (0, signal.SIGTERM)


def _daemons() -> dict[int, tuple[str, int]]:
    """Returns the names and ids of Ray's own processes that this process has started, by descriptors of them; none
    where the system has no such descriptors."""
    import psutil  # which comes with Ray

    children = psutil.Process().children() if hasattr(os, "pidfd_open") else []
    found = [(child.name(), child.pid) for child in children]
    return {os.pidfd_open(pid): (name, pid) for name, pid in found if name in DAEMONS}


def _init(address: str, settings: Mapping[str, Any]) -> None:
    for left in reversed(range(STARTS)):
        try:
            ray_module().init(address=address, **settings)
            return
        except Exception as error:  # Ray raises no specific error here
            if not left or "timed out during startup" not in str(error):
                raise


def _found(address: str) -> str:
    """Returns the address of the cluster that `auto` means to Ray, by RAY_ADDRESS or by what it finds on this machine;
    of any other, itself."""
    if address != "auto":
        return address
    from ray._private.services import get_ray_address_from_environment

    return str(get_ray_address_from_environment(address, None))


def _check_answers(address: str) -> None:
    """Raises an OSError or ValueError unless a server as Ray has answers at an address of a port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # it answers nobody who does not encrypt
            return
        connection.sendall(GREETING)
        try:
            header = connection.recv(FRAME_KIND + 1, socket.MSG_WAITALL)
        except TimeoutError as error:
            raise TimeoutError(f"{address} takes connections, but has not answered for {CONNECT_SECONDS} s") from error
    if header[FRAME_KIND:] != bytes([SETTINGS_FRAME]):
        raise ConnectionError(f"what answers at {address} is not Ray, or is another port of it")
