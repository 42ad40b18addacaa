"""The log of a program that uses rollgrad as a library."""

import subprocess
import sys

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
