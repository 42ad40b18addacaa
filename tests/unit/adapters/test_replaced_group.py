"""Processes of a model that is not trained are replaced, and calls that were under way are made again; there is no
Ray, and each group is a thread's calls of a function."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.models.ray.replaced_group import ReplacedGroup
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.errors import START_AGAIN, ConfigurationError, LostProcessError, WorkerError

Call = Callable[[str], Any]


class Group:
    """Double of a `WorkerGroup` whose calls are those of `call`, which gets the method's name."""

    name, size = "reward", 2

    def __init__(self, call: Call) -> None:
        self.call, self.closed = call, False

    def each(self, method: str, arguments: Any) -> list[Any]:
        return [self.call(method) for _ in arguments]

    def all(self, method: str, *arguments: Any) -> list[Any]:
        return [self.call(method)] * self.size

    def some(self, method: str, ranks: Any, *arguments: Any) -> list[Any]:
        return [self.call(method) for _ in ranks]

    def begin(self, method: str, ranks: Any, *arguments: Any) -> Callable[[], list[Any]]:
        return lambda: [self.call(method) for _ in ranks]

    def close(self) -> None:
        self.closed = True


def answering(method: str) -> str:
    return method


def lost(method: str) -> Any:
    raise LostProcessError(f"rank 1 died while {method!r} was under way.{START_AGAIN}")


class Starts:
    """Starts groups with one call after the other; None does not start."""

    def __init__(self, *calls: Call | None) -> None:
        self._calls = iter(calls)
        self.groups: list[Group] = []

    def __call__(self) -> Any:
        call = next(self._calls)
        if call is None:
            raise LostProcessError("rank 0 died while 'loading the model' was under way.")
        self.groups.append(Group(call))
        return self.groups[-1]


def test_a_call_that_lost_a_process_is_made_again_in_new_ones() -> None:
    starts = Starts(lost, lost, answering)
    group = ReplacedGroup(starts)
    with capture_logs() as logs:
        assert group.each("score", [[], []]) == ["score", "score"]
    assert {line["reason"] for line in logs} == {"rank 1 died while 'score' was under way."}, (
        "nobody has to start again"
    )
    assert group.all("padded") == ["padded", "padded"]
    assert group.some("judge", [1]) == ["judge"]
    assert len(starts.groups) == 3


def test_new_processes_that_are_lost_at_their_start_are_replaced_as_well() -> None:
    group = ReplacedGroup(Starts(lost, None, None, answering))
    assert group.all("score") == ["score", "score"]


@pytest.mark.parametrize("bad", [lost, None])
def test_what_is_lost_again_and_again_is_given_up(bad: Call | None) -> None:
    starts = Starts(lost, bad, bad, bad)
    group = ReplacedGroup(starts)
    for _ in range(2):
        with pytest.raises(LostProcessError, match=r"rank \d died"):
            group.all("score")


def test_replacements_count_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("rollgrad.adapters.models.ray.replaced_group.time.monotonic", lambda: now)
    starts = Starts(*[answering] * 9)
    group = ReplacedGroup(starts, bounds=FleetBounds(max_restarts=1, healed_after=60.0))
    for hours in range(1, 4):
        now = 3600.0 * hours
        starts.groups[-1].call = lost
        assert group.all("score") == ["score", "score"]
    starts.groups[-1].call = lost
    with pytest.raises(LostProcessError):
        group.all("score")


@pytest.mark.parametrize("error", [WorkerError("rank 0 failed (ValueError)"), ConfigurationError("too long")])
def test_an_error_of_the_model_itself_is_raised_and_replaces_nothing(error: Exception) -> None:
    def fail(method: str) -> Any:
        raise error

    starts = Starts(fail)
    with pytest.raises(type(error)) as raised:
        ReplacedGroup(starts).all("score")
    assert raised.value is error
    assert len(starts.groups) == 1


def test_threads_that_lose_the_same_processes_replace_them_once() -> None:
    together = threading.Barrier(4)

    def lost_by_all(method: str) -> Any:
        together.wait(60)
        return lost(method)

    starts = Starts(lost_by_all, answering, answering)
    group = ReplacedGroup(starts)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.extend(group.some("judge", [0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["judge"] * 4
    assert len(starts.groups) == 2


def test_nothing_starts_after_the_end() -> None:
    starts = Starts(lost, answering)
    group = ReplacedGroup(starts)
    group.close()
    with pytest.raises(LostProcessError):
        group.all("score")
    assert [each.closed for each in starts.groups] == [True]


def test_processes_that_start_while_the_run_ends_are_ended() -> None:
    begun, ended = threading.Event(), threading.Event()

    class Slow(Starts):
        def __call__(self) -> Any:
            if self.groups:
                begun.set()
                assert ended.wait(60)
            return super().__call__()

    starts = Slow(lost, lost)
    group = ReplacedGroup(starts)
    raised: list[Exception] = []

    def score() -> None:
        try:
            group.all("score")
        except LostProcessError as error:
            raised.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    assert begun.wait(60)
    group.close()
    ended.set()
    thread.join(60)
    assert len(raised) == 1
    assert starts.groups[-1].closed
