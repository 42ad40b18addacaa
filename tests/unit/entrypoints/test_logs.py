"""The log of a command, and of a program that uses rollgrad as a library."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import rollgrad
import structlog

rollgrad.RLConfig
log = structlog.get_logger("test")


def fails(secret):
    try:
        raise ValueError("lost")
    except ValueError:
        log.exception("It failed.")


fails("the-" + "key")
log.debug("Much else.")
structlog.configure(processors=[structlog.processors.JSONRenderer()])
rollgrad.load_config
log.info("As the program wants it.")
"""


def test_a_program_that_configures_no_log_has_it_on_stderr_without_values_of_variables() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "ValueError: lost" in run.stderr
    assert "the-key" not in run.stderr
    assert "Much else" not in run.stderr
    assert run.stderr.endswith('{"event": "As the program wants it."}\n')
    assert run.stdout == ""


def test_a_terminal_takes_no_commands_from_what_the_log_quotes() -> None:
    """A log is also read from a file, by a terminal."""
    program = """
import structlog
from rollgrad.entrypoints.cli.logs import configure_logging

configure_logging()
try:
    raise ValueError("as \\x1b[2J the server said")
except ValueError:
    structlog.get_logger().exception("failed", tool="\\x9b31m", error="\\x1b]0;owned\\x07")
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert not set(shown) & {"\x1b", "\x9b", "\x07"}
    assert "␛]0;owned␇" in shown
    assert "ValueError: as ␛[2J the server said" in shown


@pytest.mark.parametrize("kind", ["full disk", "no reader", "closed", "closed by a program"])
def test_a_line_that_cannot_be_written_ends_nothing(kind: str) -> None:
    """A run logs what goes wrong, and while it saves what it has."""
    before = {"closed": "import os; os.close(2)", "closed by a program": "sys.stderr.close()"}.get(kind, "")
    program = f"""
import sys
from rollgrad.entrypoints.cli.logs import configure_logging
from rollgrad.entrypoints.redaction import redacted_output
import structlog

with redacted_output([]):
    configure_logging()
    {before}
    for _ in range(2):
        structlog.get_logger("test").warning("The reward was 0.")
print("saved")
sys.stdout.flush()
import os; os._exit(0)  # the interpreter's own flush of what is closed is not our matter
"""
    reads, writes = os.pipe()
    os.close(reads)
    with open("/dev/full" if kind == "full disk" else os.devnull, "w") as file:
        stderr = writes if kind == "no reader" else file.fileno()
        run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, text=True)
    os.close(writes)
    assert run.stdout == "saved\n"
