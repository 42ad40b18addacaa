"""A pure state machine that decides whether an engine's requests begin, go on, wait or end, as the engine is paused,
resumed, put to sleep and woken. Every engine follows it.

| phase    | requests that have begun | requests that have not | pause(WAIT)  | drained | resume  |
|----------|--------------------------|------------------------|--------------|---------|---------|
| running  | go on                    | may begin              | draining [1] | -       | running |
| draining | go on                    | wait                   | draining     | paused  | running |
| paused   | are frozen               | wait                   | draining [1] | -       | running |

[1] paused where nothing has begun: there is nothing to wait for.

pause(KEEP) and pause(ABORT) lead to paused from everywhere. An abort besides ends all requests that have arrived before
it, in any phase: those that have begun with the tokens so far, the others without any. Requests that arrive after it
wait for `resume`.

Sleep is independent of the phase: an engine falls asleep only without requests, those that arrive meanwhile wait for
`wake`, and weights do not change. Awake, weights change only while nothing goes on: with no request begun, or paused.

Does not own: tokens, memory and processes, nor waiting coroutines (`application.engines.changes`).
"""

from enum import StrEnum

from attrs import define, field

from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode

SAMPLING = "Weights changed while requests were in flight: pause the engine first."


class Phase(StrEnum):
    """Treatment of an engine's requests, those that have begun and the others."""

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


@define(eq=False)
class ArrivedRequest:
    """A request from its arrival to its end; `name` is the engine's own."""

    name: str
    aborts_before: int
    begun: bool = False


@define
class RequestFlow:
    """Records events of an engine, and decides what its requests may do.

    `begin` alone may be called in another thread: an engine that samples in steps may begin requests in the step that a
    pause finds under way.
    """

    phase: Phase = Phase.RUNNING
    asleep: bool = False
    _aborts: int = 0
    _requests: dict[ArrivedRequest, None] = field(factory=dict)

    @property
    def paused(self) -> bool:
        """Whether requests that have begun are frozen."""
        return self.phase is Phase.PAUSED

    @property
    def draining(self) -> bool:
        """Whether a pause waits for requests that have begun."""
        return self.phase is Phase.DRAINING

    @property
    def may_begin(self) -> bool:
        """Whether requests that wait may begin."""
        return self.phase is Phase.RUNNING and not self.asleep

    @property
    def in_flight(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self._requests)

    @property
    def has_begun(self) -> bool:
        """Whether there is a request that has begun and not ended."""
        return any(request.begun for request in self._requests)

    @property
    def begun(self) -> list[ArrivedRequest]:
        """Requests that have begun and not ended, in the order of their arrival."""
        return [request for request in self._requests if request.begun]

    def holds(self, request: ArrivedRequest) -> bool:
        """Returns whether a request has not ended."""
        return request in self._requests

    def arrive(self, name: str = "") -> ArrivedRequest:
        """Records the arrival of a request, which waits; returns it."""
        request = ArrivedRequest(name, self._aborts)
        self._requests[request] = None
        return request

    def begin(self, request: ArrivedRequest) -> None:
        """Records that a request is sampled from now on; `may_begin` must hold."""
        request.begun = True

    def wait_again(self, request: ArrivedRequest) -> None:
        """Records that the sampler of a request was lost; the request waits as if it had just arrived."""
        request.begun = False

    def end(self, request: ArrivedRequest) -> None:
        """Records the end of a request, in any way; idempotent."""
        self._requests.pop(request, None)

    def aborted(self, request: ArrivedRequest) -> bool:
        """Returns whether an abort has come since a request's arrival."""
        return request.aborts_before != self._aborts

    def pause(self, mode: PauseMode) -> None:
        """Pauses, as in the table; idempotent."""
        if mode is PauseMode.ABORT:
            self._aborts += 1
        self.phase = Phase.DRAINING if mode is PauseMode.WAIT and self.has_begun else Phase.PAUSED

    def drained(self) -> None:
        """Records that the requests have ended for which a pause waits; no effect if none waits."""
        if self.draining:
            self.phase = Phase.PAUSED

    def resume(self) -> None:
        """Lets requests go on; idempotent."""
        self.phase = Phase.RUNNING

    def sleep(self) -> None:
        """Falls asleep; idempotent.

        Raises:
            EngineError: requests are in flight; nothing has changed.
        """
        self.require_no_requests()
        self.asleep = True

    def wake(self) -> None:
        """Wakes up; idempotent."""
        self.asleep = False

    def restarted(self) -> None:
        """Records that the engine has started again: awake, not paused. Its waiting requests stay."""
        self.phase, self.asleep = Phase.RUNNING, False

    def require_no_requests(self) -> None:
        """Checks that the engine may fall asleep now.

        Raises:
            EngineError: requests are in flight.
        """
        if self.in_flight:
            raise EngineError("The engine cannot sleep while requests are in flight: pause it with abort or wait.")

    def require_change_of_weights(self) -> None:
        """Checks that weights may change now.

        Raises:
            EngineError: they may not.
        """
        if self.asleep:
            raise EngineError("Weights cannot change while the engine sleeps: wake it first.")
        if not self.paused and self.has_begun:
            raise EngineError(SAMPLING)
