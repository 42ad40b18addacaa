"""How far a pass over many rows is."""

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.data.passing import passing


def test_a_log_has_a_line_every_ten_seconds() -> None:
    now = 0.0

    def items() -> Iterator[int]:
        nonlocal now
        for item in range(100):
            now += 1.0
            yield item

    with capture_logs() as said:
        assert list(passing(items(), "reading", 200, bar_from=1, rows=2, clock=lambda: now)) == [*range(100)]
    assert {line["event"] for line in said} == {"reading"}
    assert [(line["done"], line["of"]) for line in said] == [(tens * 20 - 2, 200) for tens in range(1, 11)]


def test_a_quick_pass_has_none() -> None:
    with capture_logs() as said:
        assert list(passing("abc", "reading", 3, bar_from=1)) == ["a", "b", "c"]
    assert said == []


@pytest.mark.parametrize(("total", "shown"), [(9, False), (10, True)])
def test_a_terminal_has_a_bar_of_many_rows(
    total: int, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert len(list(passing(range(5), "reading", total, bar_from=10, rows=2))) == 5
    assert ("reading" in capsys.readouterr().err) is shown
