"""Promises of every prompt source."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymPromptSource
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.prompt_source import PromptSource
from rollgrad.testing.prompt_source import FakePromptSource

SIZE = 7


@pytest.fixture(params=["fake", "dataset", "reasoning_gym"])
def make(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Callable[[], PromptSource]:
    codec = TemplateCodec(tiny_tokenizer)
    rows = [{"input": f"question {index}"} for index in range(SIZE)]
    prompts = [Prompt(token_ids=(index + 1,), text=f"question {index}") for index in range(SIZE)]
    makers: dict[str, Callable[[], PromptSource]] = {
        "fake": lambda: FakePromptSource(prompts, seed=3, shuffle=True),
        "dataset": lambda: DatasetPromptSource(rows, PromptBuilder(codec, DataConfig()), seed=3),
        "reasoning_gym": lambda: ReasoningGymPromptSource(
            "reasoning_gym:chain_sum", codec, DataConfig(), size=SIZE, seed=3
        ),
    }
    return makers[request.param]


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_it_is_a_prompt_source_of_known_length(make: Callable[[], PromptSource]) -> None:
    source = make()
    assert isinstance(source, PromptSource)
    assert len(source) == SIZE


def test_an_epoch_holds_each_prompt_once_and_the_next_epoch_follows(make: Callable[[], PromptSource]) -> None:
    source = make()
    first, second = texts(source.take(SIZE)), texts(source.take(SIZE))
    assert len(set(first)) == SIZE
    assert sorted(first) == sorted(second)
    assert first != second


def test_the_stream_does_not_depend_on_how_it_is_cut(make: Callable[[], PromptSource]) -> None:
    whole, pieces = make(), make()
    assert texts(whole.take(3 * SIZE)) == texts([p for count in (1, 5, 9, 6) for p in pieces.take(count)])


def test_a_restored_source_continues_where_the_other_stopped(make: Callable[[], PromptSource]) -> None:
    source, restored = make(), make()
    source.take(SIZE + 2)
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert texts(restored.take(SIZE)) == texts(source.take(SIZE))


def test_prompts_are_ready_as_token_ids(make: Callable[[], PromptSource]) -> None:
    for prompt in make().take(SIZE):
        assert prompt.token_ids
        assert all(isinstance(token, int) for token in prompt.token_ids)
