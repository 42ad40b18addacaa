"""Tests of what is killed where the process of an actor stands still."""

import subprocess
from contextlib import suppress

import psutil
import pytest

from rollgrad.adapters.ray import processes
from tests.fakes import cluster


@pytest.mark.parametrize(("title", "ends"), [("ray::EngineHost.call", True), ("another", False)])
def test_an_actor_s_process_ends_with_all_that_it_has_started_and_no_other_process(title: str, ends: bool) -> None:
    """The id of one that has ended may be another process's by now. None of those that end acts on SIGTERM."""
    command = [title, "-c", "sleep 600 & wait"]
    with subprocess.Popen(command, executable="/bin/bash") as started:
        process = psutil.Process(started.pid)
        cluster.wait_for(lambda: cluster.title_of(process).startswith(title) and process.children(), "its child", 60)
        family = [*process.children(), process]
        try:
            for each in family:
                each.suspend()
            processes._kill(started.pid)
            if ends:
                cluster.wait_for(lambda: not any(map(cluster.lives, family)), "the end of all", 60)
            assert [cluster.lives(each) for each in family] == [not ends] * 2
        finally:
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
    processes._kill(started.pid)  # it has ended
