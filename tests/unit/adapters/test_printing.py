"""Tests of the redirection of what the processes of libraries print."""

import os
import select
import subprocess

import pytest

from rollgrad.adapters.system.printing import printing_to_stderr


def test_what_a_process_prints_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    with printing_to_stderr():
        process = subprocess.Popen(["sh", "-c", "read line; echo $line"], stdin=subprocess.PIPE)
    os.write(1, b"result\n")
    process.communicate(b"noise\n")  # it prints after the block, in which it was started
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("result\n", "noise\n")


def test_a_process_that_outlives_this_one_keeps_no_reader_waiting(capfd: pytest.CaptureFixture[str]) -> None:
    reads, writes = os.pipe()
    own, gate = os.dup(1), os.pipe()
    os.dup2(writes, 1)
    os.close(writes)
    try:
        with printing_to_stderr():
            child = os.fork()
            if child == 0:
                os.close(gate[1])
                os.read(gate[0], 1)
                os._exit(0)
    finally:
        os.dup2(own, 1)  # closes the last end of the pipe that this process has
        os.close(own)
    try:
        assert select.select([reads], [], [], 60)[0], "the end, while the child goes on"
        assert os.read(reads, 1) == b""
    finally:
        os.close(gate[1])
        os.waitpid(child, 0)
        os.close(reads)
        os.close(gate[0])
