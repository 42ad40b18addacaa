"""Processes of actors, as the machines that they are on know them."""

import os
from contextlib import suppress
from typing import Any

from attrs import frozen

from rollgrad.adapters.ray.session import machine, ray_module

TITLE = "ray::"
"""Beginning of the titles of Ray's workers."""


@frozen
class ActorProcess:
    """The process of an actor: its id, and Ray's id of its machine."""

    pid: int
    machine: str

    @classmethod
    def own(cls) -> "ActorProcess":
        """Returns the process of the actor that asks."""
        return cls(os.getpid(), machine())

    def kill(self) -> Any:
        """Kills the process and those that it has started, by a task on its machine; returns Ray's reference of it.

        `ray.kill` asks a process to end, and has it killed if it does not. But a process that is stopped (SIGSTOP, a
        debugger) answers no new connection. After Ray has tried to connect for long, it takes the process for dead;
        then the process stays, and so does its reservation, for which a replacement would wait.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.machine, soft=False)
        return ray_module().remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(self.pid)


def _kill(pid: int) -> None:
    import psutil  # which comes with Ray

    with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        process = psutil.Process(pid)
        if not "".join(process.cmdline()).startswith(TITLE):
            return  # the id is another process's by now
        family = [process, *process.children(recursive=True)]  # which may stand still as well
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
