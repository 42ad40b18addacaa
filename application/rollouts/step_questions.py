"""Replies that a caller's function asks for between two steps of a run.

Invariant: they change nothing of the run: their seeds are of their own, and no reward or trajectory is made. Does not
own: when they may be asked for (`step_callback`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, fields

from rollgrad.application.rollouts.groups import sample_seed
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.rollout_engine import RolloutEngine


class StepQuestions:
    """Samples replies from `engine` with the sampling settings `params`."""

    def __init__(self, engine: RolloutEngine, codec: ChatCodec, params: SamplingParams) -> None:
        self._engine = engine
        self._codec = codec
        self._params = params

    async def __call__(self, prompts: Sequence[Any], **sampling: Any) -> list[str]:
        """Returns the text of a reply to each prompt: a text, a list of messages, or a `Prompt`; `sampling` are fields
        of `SamplingParams` that differ.

        Raises:
            ConfigurationError: the prompts are one text or one conversation, or there is no such field.
            EngineError: sampling failed.
            ValueError: a field may not have such a value.
        """
        _check(prompts, sampling)
        params = evolve(self._params, top_logprobs=0, **sampling)
        requests = [
            self._request(prompt, evolve(params, seed=sample_seed(params.seed, number)))
            for number, prompt in enumerate(prompts)
        ]
        tasks = [asyncio.ensure_future(self._engine.generate(request)) for request in requests]
        try:
            replies = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the others of one that failed
                task.cancel()
        return [self._codec.decode(reply.token_ids) for reply in replies]

    def _request(self, prompt: Any, params: SamplingParams) -> GenerationRequest:
        if isinstance(prompt, Prompt):
            return GenerationRequest(prompt_token_ids=prompt.token_ids, params=params, images=prompt.images)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        rendered = self._codec.render(messages)
        return GenerationRequest(prompt_token_ids=rendered.token_ids, params=params, images=rendered.images)


FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name != "top_logprobs")
"""Fields that a caller may set: log-probs of other tokens are not returned."""


def _check(prompts: Sequence[Any], sampling: Mapping[str, Any]) -> None:
    unknown = sorted(sampling.keys() - set(FIELDS))
    if unknown:
        raise ConfigurationError(f"run.generate has no {', '.join(unknown)}: it takes {', '.join(FIELDS)}.")
    if isinstance(prompts, str | Prompt) or any(isinstance(prompt, Mapping) for prompt in prompts):
        raise ConfigurationError(
            "run.generate takes a list of prompts, and was given one: write run.generate([prompt]); each is a text, a "
            "list of messages, or a Prompt."
        )
