"""A reward model behind HTTP: `POST / or /get_reward {query, prompts, labels} -> {rewards, scores, extra_logs}`.

Requests that wait together are scored together, on one thread. Invariants: a request is scored whole or not at all;
what waits is bounded; whoever hangs up before its turn gives its place back. Does not own: the socket (`serving.py`),
the model, of which it knows two methods.
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
"""Texts that wait at most by default; those being scored not counted."""
ROUND_TEXTS = 256
"""Texts scored in one go, unless one request brings more: enough to find others of like length, few enough that who
comes next does not wait long."""
RETRY_SECONDS = 1
"""When to come back to a full queue."""
JOIN_SECONDS = 30.0
"""Longest wait for the texts being scored when the queue closes."""

CLIENT_GONE = 499
"""nginx's status for an answer that nobody waits for; only tests of the app see it."""


class Encoded(Protocol):
    """A text as the model reads it."""

    @property
    def truncated(self) -> bool:
        """Whether the model does not see all of it."""
        ...


EncodedT = TypeVar("EncodedT", bound=Encoded)


class Scorer(Protocol[EncodedT]):
    """What scores texts (`adapters.torch.reward_model.RewardModel`); called from one thread."""

    def encode(self, text: str) -> EncodedT:
        """One text as the model reads it."""
        ...

    def score_encoded(self, texts: Sequence[EncodedT]) -> list[float]:
        """One number a text, in order."""
        ...


@frozen
class Scored:
    """A text's score, and whether the model saw only a part of the text."""

    value: float
    truncated: bool


@define(eq=False)
class Job:
    """Texts that wait for their scores; only `ScoreQueue` settles `answer`."""

    texts: Sequence[str]
    answer: Future[list[Scored]] = field(factory=Future)


class ScoreQueue:
    """One thread that scores what waits, oldest first. All methods may be called from any thread.

    Args:
        scorer: the model.
        capacity: texts that may wait.
    """

    def __init__(self, scorer: Scorer[Any], *, capacity: int = QUEUE_TEXTS) -> None:
        self.capacity = capacity
        self.waiting = 0
        """Texts that wait."""
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
        """Gives up a job's place; nothing happens to one that waits no more."""
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
                self.waiting -= len(job.texts)
                job.answer.cancel()

    def close(self) -> None:
        """Cancels what waits, and waits (JOIN_SECONDS at most) for what is being scored. Idempotent."""
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
        finally:  # nobody else would ever settle what waits, or comes
            self._cancel_all()

    def _next_round(self) -> list[Job] | None:
        """What is scored next; None once the queue is closed."""
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
        except Exception as error:  # the model's, the tokenizer's or the text's: the thread goes on
            if len(jobs) == 1:
                jobs[0].answer.set_exception(error)
                return
            for job in jobs:  # one of them may be to blame: the others get their scores
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
        HttpError: 400, the request is not what the protocol says, or larger than the queue.
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
        if not math.isfinite(value):  # another attempt would end alike: no 5xx
            raise HttpError(422, f"The model's score of query[{index}] is {value}.", code="score_not_finite")
    return {
        "rewards": values,
        "scores": values,
        "extra_logs": {"query_truncated": [float(each.truncated) for each in scored]},
    }
