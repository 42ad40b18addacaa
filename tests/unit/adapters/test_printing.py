"""Tests of the redirection of what the processes of libraries print."""

import os
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
