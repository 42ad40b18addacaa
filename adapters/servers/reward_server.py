"""A reward model behind HTTP: `POST / or /get_reward {query, prompts, labels} -> {rewards, scores, extra_logs}`.

Requests that wait at the same time are scored together, on one thread. Invariants: a request is scored whole or not at
all; the queue is bounded; a client that disconnects before its turn leaves the queue. Does not own: the socket
(`server.py`), the model, of which it uses two methods.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from attrs import define, field, frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollgrad.adapters.servers.guard import HttpError, read_json
from rollgrad.adapters.servers.server import create_app, health_route
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import RewardError

QUEUE_TEXTS = 4096
"""Largest number of waiting texts by default, not counting those being scored."""
ROUND_TEXTS = 256
"""Texts scored in one round, unless a single request has more: enough to batch texts of similar length, few enough that
the next request does not wait long."""
RETRY_SECONDS = 1
"""Seconds after which a client may retry a full queue."""
JOIN_SECONDS = 30.0
"""Longest wait for the texts being scored when the queue closes."""

CLIENT_GONE = 499
"""nginx's status for a client that has disconnected; only tests of the app see it."""


class Encoded(Protocol):
    """The model's tokens of a text."""

    @property
    def truncated(self) -> bool:
        """Whether the model reads only a part of the text."""
        ...


EncodedT = TypeVar("EncodedT", bound=Encoded)


class Scorer(Protocol[EncodedT]):
    """A model that scores texts, called from one thread (`adapters.models.torch.rewards.reward_model.RewardModel`)."""

    def encode(self, text: str) -> EncodedT:
        """Returns the tokens that the model reads of a text."""
        ...

    def score_encoded(self, texts: Sequence[EncodedT]) -> list[float]:
        """Returns one number for each text, in order."""
        ...


@frozen
class Scored:
    """A text's score, and whether the model read only a part of the text."""

    value: float
    truncated: bool


@define(eq=False)
class Job:
    """Texts that wait for their scores; only `ScoreQueue` settles `answer`."""

    texts: Sequence[str]
    answer: Future[list[Scored]] = field(factory=Future)


class ScoreQueue:
    """One thread that scores waiting texts, oldest first. All methods may be called from any thread.

    Args:
        scorer: the model.
        capacity: texts that may wait.
    """

    def __init__(self, scorer: Scorer[Any], *, capacity: int = QUEUE_TEXTS) -> None:
        self.capacity = capacity
        self.waiting = 0
        """Number of waiting texts."""
        self._scorer = scorer
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="rollgrad-reward", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[str]) -> Job | None:
        """Returns a job whose `answer` has one score a text, in order; None if the queue is full. Cancelled if it is
        closed."""
        job = Job(texts)
        with self._changed:
            if self._closed:
                job.answer.cancel()
                return job
            if self.waiting + len(texts) > self.capacity:
                return None
            self._jobs.append(job)
            self.waiting += len(texts)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Removes a job from the queue; does nothing if it no longer waits."""
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
                self.waiting -= len(job.texts)
                job.answer.cancel()

    def close(self) -> None:
        """Cancels waiting jobs, and waits (JOIN_SECONDS at most) for those being scored; idempotent."""
        self._cancel_all()
        self._thread.join(JOIN_SECONDS)

    def _cancel_all(self) -> None:
        with self._changed:
            self._closed = True
            for job in list(self._jobs):
                self.cancel(job)
            self._changed.notify()

    def _work(self) -> None:
        try:
            while (jobs := self._next_round()) is not None:
                self._settle(jobs)
        finally:  # otherwise waiting and later jobs would never be settled
            self._cancel_all()

    def _next_round(self) -> list[Job] | None:
        """Waits for the jobs to score next; returns None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            jobs: list[Job] = []
            texts = 0
            while self._jobs and (not jobs or texts + len(self._jobs[0].texts) <= ROUND_TEXTS):
                job = self._jobs.popleft()
                self.waiting -= len(job.texts)
                if job.answer.set_running_or_notify_cancel():
                    jobs.append(job)
                    texts += len(job.texts)
            return jobs

    def _settle(self, jobs: Sequence[Job]) -> None:
        try:
            with foreign_code(lambda words: RewardError(f"The reward model cannot score the texts: {words}")):
                encoded = [self._scorer.encode(text) for job in jobs for text in job.texts]
                values = self._scorer.score_encoded(encoded)
                scored = iter([Scored(value, text.truncated) for value, text in zip(values, encoded, strict=True)])
        except Exception as error:  # of the model, the tokenizer or a text: the thread goes on
            if len(jobs) == 1:
                jobs[0].answer.set_exception(error)
                return
            for job in jobs:  # one job may be the cause, so each is scored alone
                self._settle([job])
            return
        for job in jobs:
            job.answer.set_result([next(scored) for _ in job.texts])


def create_reward_app(queue: ScoreQueue, *, model: str) -> Starlette:
    """Returns the server's app; `model` is the name that /health tells, with the number of texts that wait
    (`queued`)."""

    async def get_reward(request: Request) -> Response:
        texts = _texts(await read_json(request), queue.capacity)
        job = queue.submit(texts)
        if job is None:
            raise HttpError(
                429,
                f"{queue.capacity} texts wait already: try again in {RETRY_SECONDS} s.",
                code="queue_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        answer = asyncio.wrap_future(job.answer)
        gone = asyncio.create_task(_disconnected(request))
        try:
            waits: set[asyncio.Future[Any]] = {answer, gone}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=CLIENT_GONE)
            if answer.cancelled():
                raise HttpError(503, "The server is stopping: ask another.", code="stopping")
            return JSONResponse(_answer(answer.result()))
        finally:
            gone.cancel()
            queue.cancel(job)
            answer.cancel()

    return create_app(
        [
            Route("/", get_reward, methods=["POST"]),
            Route("/get_reward", get_reward, methods=["POST"]),
            health_route(lambda: {"model": model, "queued": queue.waiting}),
        ]
    )


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _texts(body: dict[str, Any], limit: int) -> list[str]:
    """Returns the texts to score.

    Raises:
        HttpError: 400, the request violates the protocol, or is larger than the queue.
    """
    query = body.get("query")
    if not isinstance(query, list) or not query:
        raise HttpError(400, "query must be a list of texts, at least one.", code="invalid_query")
    if len(query) > limit:
        raise HttpError(400, f"query has {len(query)} texts; at most {limit} fit a request.", code="too_many_texts")
    for name, are_texts in (("query", True), ("prompts", True), ("labels", False)):
        values = body.get(name)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != len(query):
            raise HttpError(400, f"{name} must be a list as long as query ({len(query)}).", code=f"invalid_{name}")
        for index, value in enumerate(values if are_texts else ()):
            if not isinstance(value, str):
                raise HttpError(400, f"{name}[{index}] is not a text.", code=f"invalid_{name}")
    for index, text in enumerate(query):
        if not text:
            raise HttpError(400, f"query[{index}] is empty.", code="invalid_query")
    return query


def _answer(scored: Sequence[Scored]) -> dict[str, Any]:
    values = [each.value for each in scored]
    for index, value in enumerate(values):
        if not math.isfinite(value):  # a retry would give the same, so it is no 5xx
            raise HttpError(422, f"The model's score of query[{index}] is {value}.", code="score_not_finite")
    return {
        "rewards": values,
        "scores": values,
        "extra_logs": {"query_truncated": [float(each.truncated) for each in scored]},
    }
