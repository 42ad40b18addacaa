"""Joins a Ray cluster, or starts one on this machine for as long as the run."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.system.python_file import USER_MODULE
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.application.foreign import first_line
from rollgrad.domain.errors import ConfigurationError, MissingExtraError

CONNECT_SECONDS = 60
"""Longest wait for a cluster's answer."""

VARIABLES = {
    "RAY_worker_niceness": "0",  # Ray would lower the priority of training
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # hides all GPUs from processes that have none
}
"""Environment variables of the processes of a cluster that is started here."""

STARTS = 3
"""Attempts to start a cluster here: Ray gives up after 30 seconds, which may be too few on a busy machine."""

NO_RAY = "--cluster.enable needs Ray, and so does --num_engines: pip install rollgrad[ray,deepspeed,vllm]."
"""The error where it is not installed."""


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

    def __init__(self, address: str | None, *, cpus: float) -> None:
        ray = ray_module()
        send_users_classes_whole(ray.cloudpickle)
        self._owned = not ray.is_initialized()
        if not self._owned:
            return
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            settings |= {"num_cpus": max(1, round(cpus + 0.5)), "include_dashboard": False}
        try:
            if address is not None and ":" in address:
                _check_reachable(address)  # Ray itself would try for minutes
            with waiting_for("Ray to start on this machine" if address is None else f"the Ray cluster at {address}"):
                _init(address or "local", settings)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"cluster.address is {address!r}, where no Ray cluster answers ({first_line(error)}): start "
                "one with `ray start --head`, or leave --cluster.address out to run on this machine."
            ) from error

    def close(self) -> None:
        """Closes the connection, and ends a cluster that was started here; idempotent."""
        if self._owned:
            ray_module().shutdown()
            self._owned = False


def _init(address: str, settings: Mapping[str, Any]) -> None:
    for left in reversed(range(STARTS)):
        try:
            ray_module().init(address=address, **settings)
            return
        except Exception as error:  # Ray raises no specific error here
            if not left or "timed out during startup" not in str(error):
                raise


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
