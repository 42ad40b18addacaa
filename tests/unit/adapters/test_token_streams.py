"""Tokens of replies that are sampled elsewhere, and how they were sampled, are heard in order."""

import asyncio

import pytest

from rollgrad.adapters.engines.token_streams import TokenStreams, ToldTokens
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.ports.rollout_engine import SampleListener, tell

TOKENS = list(range(20))


class Ear(SampleListener):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.samples: list[tuple[float, int, bool]] = []

    def sampled(self, logprob: float, version: int, last: bool) -> None:
        self.samples.append((logprob, version, last))

    def __call__(self, token: int) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize("says", [True, False], ids=["how it samples", "tokens alone"])
async def test_what_an_engine_says_of_its_tokens_reaches_the_listener(says: bool) -> None:
    far = ToldTokens()
    streams = TokenStreams(far.fetched)

    async def sample(number: int) -> Generation:
        listener = far.listener(number)
        for token in TOKENS:
            if says:
                tell(listener, token, -0.5 * token, 3, last=token == TOKENS[-1])
            else:
                listener(token)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        far.end(number)
        return Generation(
            token_ids=TOKENS,
            logprobs=[-0.5 * token for token in TOKENS],
            versions=[3] * len(TOKENS),
            stop_reason=StopReason.LENGTH,
        )

    ears, plain = [Ear() for _ in range(3)], list[int]()
    await asyncio.gather(*(streams.generate(sample, ear) for ear in ears), streams.generate(sample, plain.append))
    assert plain == TOKENS
    for ear in ears:
        assert ear.tokens == TOKENS
        assert ear.samples == [(-0.5 * token, 3, token == TOKENS[-1]) for token in TOKENS if says]
