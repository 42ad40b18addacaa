"""The machine of an engine's pauses: its table, and every sequence of seven events."""

import itertools

import pytest

from rollgrad.domain.control.request_flow import ArrivedRequest, Phase, RequestFlow
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode

RUNNING, DRAINING, PAUSED = Phase
WAIT, KEEP, ABORT = PauseMode.WAIT, PauseMode.KEEP, PauseMode.ABORT

TABLE = {
    # (phase, whether a request has begun): phases after wait, keep or abort, drained, resume
    (RUNNING, False): (PAUSED, PAUSED, RUNNING, RUNNING),
    (RUNNING, True): (DRAINING, PAUSED, RUNNING, RUNNING),
    (DRAINING, False): (PAUSED, PAUSED, PAUSED, RUNNING),
    (DRAINING, True): (DRAINING, PAUSED, PAUSED, RUNNING),
    (PAUSED, False): (PAUSED, PAUSED, PAUSED, RUNNING),
    (PAUSED, True): (DRAINING, PAUSED, PAUSED, RUNNING),
}


class Watched:
    """A flow as an engine drives it, and what is expected of it, written down apart."""

    def __init__(self) -> None:
        self.flow = RequestFlow()
        self.phase = RUNNING
        self.asleep = False
        self.waiting: list[ArrivedRequest] = []
        self.begun: list[ArrivedRequest] = []
        self.aborted: list[ArrivedRequest] = []

    def move(self, event: str) -> None:
        after_wait, after_stop, after_drained, after_resume = TABLE[self.phase, bool(self.begun)]
        if event == "arrive":
            self.waiting.append(self.flow.arrive())
        elif event == "begin" and self.waiting and self.flow.may_begin:
            self.flow.begin(self.waiting[0])
            self.begun.append(self.waiting.pop(0))
        elif event == "end" and self.begun:
            self.flow.end(self.begun.pop(0))
        elif event == "wait":
            self.flow.pause(WAIT)
            self.phase = after_wait
        elif event == "keep":
            self.flow.pause(KEEP)
            self.phase = after_stop
        elif event == "abort":
            self.flow.pause(ABORT)
            self.phase = after_stop
            self.aborted = [*self.waiting, *self.begun]
        elif event == "drained":
            self.flow.drained()
            self.phase = after_drained
        elif event == "resume":
            self.flow.resume()
            self.phase = after_resume
        elif event == "sleep" and not (self.waiting or self.begun):
            self.flow.sleep()
            self.asleep = True
        elif event == "sleep":
            with pytest.raises(EngineError, match="sleep while requests are in flight"):
                self.flow.sleep()
        elif event == "wake":
            self.flow.wake()
            self.asleep = False

    def check(self) -> None:
        flow = self.flow
        assert flow.phase is self.phase
        assert flow.asleep == self.asleep
        assert flow.may_begin == (self.phase is RUNNING and not self.asleep)
        assert flow.begun == self.begun
        assert flow.has_begun == bool(self.begun)
        assert flow.in_flight == bool(self.waiting or self.begun)
        for request in (*self.waiting, *self.begun):
            assert flow.holds(request)
            assert flow.aborted(request) == (request in self.aborted)
        try:
            flow.require_change_of_weights()
            may_change = True
        except EngineError:
            may_change = False
        assert may_change == (not self.asleep and (self.phase is PAUSED or not self.begun))


EVENTS = ("arrive", "begin", "end", "wait", "keep", "abort", "drained", "resume", "sleep", "wake")


@pytest.mark.parametrize("first", EVENTS)
def test_every_sequence_of_events_follows_the_table(first: str) -> None:
    for rest in itertools.product(EVENTS, repeat=3):
        watched = Watched()
        for event in ("arrive", "begin", "arrive", first, *rest):
            watched.move(event)
            watched.check()


@pytest.mark.parametrize("first", EVENTS)
def test_every_sequence_of_events_without_requests_follows_the_table(first: str) -> None:
    for rest in itertools.product(EVENTS, repeat=3):
        watched = Watched()
        for event in (first, *rest):
            watched.move(event)
            watched.check()


def test_who_arrives_after_an_abort_is_not_ended_by_it() -> None:
    flow = RequestFlow()
    before = flow.arrive()
    flow.pause(ABORT)
    after = flow.arrive()
    assert flow.aborted(before)
    assert not flow.aborted(after)
    flow.pause(ABORT)
    assert flow.aborted(after)


def test_a_request_that_lost_its_engine_waits_as_if_it_had_just_come() -> None:
    flow = RequestFlow()
    request = flow.arrive()
    flow.begin(request)
    flow.wait_again(request)
    flow.pause(WAIT)
    assert flow.paused, "nothing has begun that the pause could wait for"
    assert flow.in_flight
    flow.end(request)
    flow.end(request)
    assert not flow.in_flight


def test_an_engine_that_has_begun_anew_is_awake_and_runs() -> None:
    flow = RequestFlow()
    flow.pause(KEEP)
    flow.sleep()
    flow.restarted()
    assert flow.may_begin
