"""The last words of vLLM's processes, told from what they print."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollgrad.adapters.engines.vllm.last_words import is_elsewhere, last_error, last_words

AT = "ERROR 11-29 20:10:08 [core.py:1512]"
OF_ONE = f"""(MainProcess pid=1) WARNING 11-29 20:09:18 [vllm.py:725] the V1 model runner is used
(EngineCore pid=7) {AT} EngineCore encountered a fatal error.
(EngineCore pid=7) {AT} Traceback (most recent call last):
(EngineCore pid=7) {AT}   File "core.py", line 1496, in run_engine_core
(EngineCore pid=7) {AT}     raise RuntimeError("no")
(EngineCore pid=7) {AT} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
(MainProcess pid=1) {AT} vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""
OF_TWO = f"""(Worker_TP1 pid=9) {AT} WorkerProc failed to start.
(Worker_TP1 pid=9) {AT} ValueError: Free memory on device cuda:1 is less than desired.
(EngineCore pid=7) {AT} Exception: WorkerProc initialization failed due to an exception. See stack trace for root cause.
"""


@contextmanager
def stderr_is(number: int) -> Iterator[None]:
    """Makes a file the stderr of this process inside the block."""
    own = os.dup(2)
    os.dup2(number, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def test_the_error_of_the_process_that_failed_first_is_told() -> None:
    assert last_error(OF_ONE) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert last_error(OF_TWO) == "ValueError: Free memory on device cuda:1 is less than desired."
    assert last_error("(EngineCore pid=7) WARNING 11-29 20:10:04 [vllm.py:725] ValueError: none\n") is None
    assert is_elsewhere("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    assert not is_elsewhere("max_model_len is too large")


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (
            OF_TWO,
            "the last error that vLLM printed is 'ValueError: Free memory on device cuda:1 is less than desired.'",
        ),
        ("", "vLLM printed no error, as if it was killed, perhaps because memory was full"),
    ],
)
def test_errors_are_read_where_stderr_is_a_file(tmp_path: Path, printed: str, told: str) -> None:
    log = tmp_path / "worker-1.err"
    with log.open("w") as file, stderr_is(file.fileno()):
        os.write(2, printed.encode())
        words = last_words()
    assert words == f"{told} ({log})"


def test_where_stderr_is_no_file_whoever_reads_it_has_seen_the_error() -> None:
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write), stderr_is(write):
        words = last_words()
    assert words == "what vLLM has printed says why"
