"""Rows, replies and servers give a terminal no commands by what they say."""

import pytest

from rollgrad.entrypoints.cli.commands import run_command
from rollgrad.entrypoints.findings import Findings
from rollgrad.entrypoints.terminal_text import without_commands


def test_every_control_character_but_line_ends_and_tabs_is_drawn() -> None:
    controls = "".join(map(chr, (*range(32), *range(127, 160))))
    shown = without_commands(controls)
    assert len(shown) == len(controls)
    assert [character for character in shown if not character.isprintable()] == ["\t", "\n"]
    assert without_commands("one\r\ntwo é 🙂") == "one\ntwo é 🙂"


def test_what_a_dry_run_shows_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    Findings([]).say("a prompt: \x1b]52;c;eA==\x07\x9b2J")
    assert capsys.readouterr().out == "a prompt: ␛]52;c;eA==␇\ufffd2J\n"


def test_what_an_error_quotes_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", "no\x1b[2Jrun"]) == 2
    assert "\x1b" not in capsys.readouterr().err
