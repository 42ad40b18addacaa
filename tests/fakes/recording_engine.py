"""A `RolloutEngine` that says what it is told to, and remembers every word."""

import random
from collections.abc import Callable, Sequence

from attrs import frozen

from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine


@frozen(eq=False)
class Exchange:
    """Tokens that the engine was given, and those that it sampled."""

    prompt: tuple[int, ...]
    generation: Generation


class RecordingEngine(RolloutEngine):
    """Answers the n-th request with `reply(request, n)`, cut to the request's budget.

    Every token it ever samples has a log-prob of its own, so that none can be taken for another.
    """

    def __init__(self, reply: Callable[[GenerationRequest, int], Sequence[int]]) -> None:
        self._reply = reply
        self._sampled = 0
        self.exchanges: list[Exchange] = []

    def set_version(self, version: int) -> None:
        raise AssertionError("Each reply has a version of its own.")

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        number = len(self.exchanges)
        wanted = list(self._reply(request, number))
        token_ids = wanted[: request.params.max_new_tokens]
        for token in token_ids:
            if on_token is not None:
                on_token(token)
        logprobs = [-0.25 * (self._sampled + i + 1) for i in range(len(token_ids))]  # exact in float32
        self._sampled += len(token_ids)
        generation = Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=[number + i % 2 for i in range(len(token_ids))],
            stop_reason=StopReason.STOP if len(token_ids) == len(wanted) else StopReason.LENGTH,
        )
        self.exchanges.append(Exchange(request.prompt_token_ids, generation))
        return generation

    async def pause(self, mode: PauseMode) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass


def random_tokens(generator: random.Random, vocabulary: int, length: int) -> list[int]:
    """`length` tokens out of `vocabulary`, special ones too."""
    return [generator.randrange(vocabulary) for _ in range(length)]
