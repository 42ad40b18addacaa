"""Questions of a caller's function to the run are answered, or refused in a sentence."""

from typing import Any

import pytest

from rollgrad.application.rollouts.step_questions import StepQuestions
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.errors import ConfigurationError
from rollgrad.testing import FakeChatCodec, FakeRolloutEngine

MESSAGE = {"role": "user", "content": "Say 1."}


def questions() -> StepQuestions:
    return StepQuestions(FakeRolloutEngine(), FakeChatCodec(), SamplingParams(max_new_tokens=4))


async def test_texts_and_conversations_are_answered() -> None:
    replies = await questions()(["Say 1.", [MESSAGE]], max_new_tokens=2, temperature=0.0)
    assert [type(reply) for reply in replies] == [str, str]


@pytest.mark.parametrize("prompts", ["Say 1.", [MESSAGE]])
async def test_one_prompt_is_not_taken_for_many(prompts: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"write run\.generate\(\[prompt\]\)"):
        await questions()(prompts)


async def test_unknown_fields_are_named_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"has no max_tokens, top_logprobs: it takes .*max_new_tokens"):
        await questions()(["Say 1."], max_tokens=2, top_logprobs=1)
