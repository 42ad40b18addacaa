"""Ends of a process by `os._exit`."""

import os
from collections.abc import Callable

import pytest

from rollgrad.adapters.system.exits import telling_exits

SOURCE = "import os\ndef reward_func(status):\n    os._exit(status)\n"


def ended(act: Callable[[Callable[[str], object]], object]) -> tuple[int, str]:
    """Returns the exit status of a fork of this process that does `act`, and what it told."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act(lambda words: os.write(writes, words.encode()))
        finally:
            os.kill(os.getpid(), 9)
    os.close(writes)
    with os.fdopen(reads) as file:
        told = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told


@pytest.mark.parametrize(("asked", "got"), [(0, 2), (3, 3)])
def test_an_exit_of_users_code_is_told_and_no_success(asked: int, got: int) -> None:
    names: dict[str, Callable[[int], None]] = {}
    exec(compile(SOURCE, "/home/me/reward.py", "exec"), names)

    def act(tell: Callable[[str], object]) -> None:
        with telling_exits(tell):
            names["reward_func"](asked)

    status, told = ended(act)
    assert status == got
    assert told.startswith("os._exit in reward.py, line 3 has ended the process")


def test_a_fork_and_what_comes_after_end_as_they_will() -> None:
    def act(tell: Callable[[str], object]) -> None:
        with telling_exits(tell):
            child = os.fork()
            if child == 0:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))

    assert ended(act) == (0, "")


def test_an_exit_that_cannot_be_told_is_none_the_less_one() -> None:
    def act(tell: Callable[[str], object]) -> None:
        def broken(words: str) -> None:
            raise OSError(words)

        with telling_exits(broken):
            os._exit(0)

    assert ended(act) == (2, "")
