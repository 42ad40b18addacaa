"""Parts that a run is made of: the source of its steps and what it promises, the models and their evaluation; and how
an update that has begun is finished."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import structlog
from attrs import frozen

from rollgrad.application.interruption import BrokenOffError, Stop, urgent
from rollgrad.domain.ports.checkpoint_store import CheckpointStore

log = structlog.get_logger(__name__)

PATIENCE_SECONDS = 10.0
"""Time that an update has to finish after a signal, before it is broken off: schedulers kill after 30 s, of which the
rest is for saving."""

Result = TypeVar("Result")
SampleCo = TypeVar("SampleCo", covariant=True)


@frozen(kw_only=True, eq=False)
class StepReport(Generic[SampleCo]):
    """A finished step: its `metrics` (`group/name`) and the `samples` it learned from, for people to read.

    `ended_by`: an error after the update was complete (the weights did not reach an engine), or the interruption that
    had to wait for the update. The step counts and is reported; then the run raises it.
    """

    metrics: Mapping[str, float]
    samples: Sequence[SampleCo] = ()
    ended_by: BaseException | None = None


class StepSource(Protocol[SampleCo]):
    """Makes the steps of a run: gets samples by playing or reading, and learns from them.

    A new source (a trainer) has to keep these promises:

    * **State.** `state_dict` is the position in the data and everything else that affects later steps,
      JSON-serialisable, without the models: the run saves those by `TrainedModels`. Samples that the position cannot
      restore (of older weights) are in `kept_samples`, nested mappings and lists of numbers, texts and tensors. After
      `load_state_dict` the next step is the one that the uninterrupted run would have taken. The keys `step`, `update`,
      `before`, `groups` and `evaluated` are the run's own.
    * **Interruption.** The run's task is cancelled at any await of `step`. Before the update that means: give back what
      was taken, so that `state_dict` is that of the last finished step, and let the `CancelledError` through. An update
      that has begun is finished (`uninterrupted` waits for one in a thread), and `ended_by` has the `CancelledError`.
      One that takes too long may break off before its first optimizer step (`heed_stop`): it has then not begun.
    * **Failure.** A `step` that raises has changed nothing, except where it took some of an update's optimizer steps:
      `TrainedModels.under_way` is then true, and the training state saved before stays the newest.
    """

    async def start(self, done: int) -> None:
        """Prepares for the first evaluation and step of this process, after `done` steps: engines get the weights."""
        ...

    async def step(self, done: int) -> StepReport[SampleCo]:
        """Takes the step after `done` finished ones."""
        ...

    async def stop(self) -> None:
        """Ends everything in flight after the last step, however the steps ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the source, JSON-serialisable."""
        ...

    def kept_samples(self) -> list[dict[str, Any]]:
        """Returns samples that are not learned from yet, if later steps begin with them."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continues from a `state_dict`, in which the run's own keys may be, too, and the `kept_samples` of then."""
        ...


class TrainedModels(Protocol):
    """The models under training with their optimizers; `UpdateService` is one."""

    under_way: bool
    """Whether an update has taken some of its optimizer steps, but not all; after an error it stays so."""

    def save(self, checkpoints: CheckpointStore, name: str) -> None:
        """Writes the models under `name`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns weights, optimizer states and the order of samples."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        ...


class Evaluation(Protocol):
    """Measures the current models on held-out data."""

    async def run(self, step: int | None = None) -> Mapping[str, float]:
        """Returns metrics, by `eval/name`; `step`: finished steps of the run, None outside a run."""
        ...


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> tuple[Result, bool]:
    """Returns the result of `work`, and whether the caller was cancelled meanwhile, to which it must react afterwards.

    Where the cancellation is `urgent`, an update that is not finished `PATIENCE_SECONDS` later, and has not changed a
    model, breaks off.

    Raises:
        asyncio.CancelledError: it did.
    """
    stop = Stop()
    task = stop.begin(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task], timeout=PATIENCE_SECONDS if cancelled else None)  # which never cancels it
        except asyncio.CancelledError:
            cancelled = True
            log.info(
                "interrupted: what has begun is finished first"
                + (f", or broken off in {PATIENCE_SECONDS:g} s if it has changed no model by then" * urgent.is_set())
                + "; who kills the run sooner loses all since its newest training state"
            )
            continue
        stop.asked = cancelled and urgent.is_set()
    try:
        return task.result(), cancelled
    except BrokenOffError as error:
        log.info("interrupted: the update took too long, and is broken off before its first optimizer step")
        raise asyncio.CancelledError from error


async def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`, unless the caller was cancelled meanwhile.

    Raises:
        asyncio.CancelledError: it was; `work` has ended by then.
    """
    result, cancelled = await uninterrupted(work)
    if cancelled:
        raise asyncio.CancelledError
    return result
