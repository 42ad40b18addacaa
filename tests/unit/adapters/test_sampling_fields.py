"""Sampling settings of a request: all that are wrong are told at once."""

from typing import Any

import pytest

from rollgrad.adapters.servers.anthropic_wire import AnthropicWire
from rollgrad.adapters.servers.completions_wire import CompletionsWire
from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.openai_wire import OpenAIWire
from rollgrad.adapters.servers.responses_wire import ResponsesWire
from rollgrad.adapters.servers.wire import Wire

SAID = {"messages": [{"role": "user", "content": "go"}]}
WRONG = {"temperature": 9, "top_p": 2}
OPENAI = {**WRONG, "seed": "x", "top_k": -2}


@pytest.mark.parametrize(
    ("wire", "body", "named"),
    [
        (
            OpenAIWire(),
            {**SAID, **OPENAI, "n": 0, "stop": [""], "presence_penalty": 1, "logit_bias": {"1": 1}, "max_tokens": 0},
            ["n is", "stop must", "presence_penalty is", "logit_bias is", "max_tokens is"],
        ),
        (AnthropicWire(), {**SAID, **WRONG, "top_k": -1, "max_tokens": 0}, ["top_k is", "max_tokens is"]),
        (
            ResponsesWire(),
            {"input": "go", **OPENAI, "conversation": "a", "prompt": "b", "max_output_tokens": 0},
            ["conversation is", "prompt is", "max_output_tokens is"],
        ),
        (
            CompletionsWire(),
            {"prompt": "go", **OPENAI, "best_of": 3, "min_tokens": -1, "stop_token_ids": [-1]},
            ["best_of is", "min_tokens is", "stop_token_ids"],
        ),
    ],
)
def test_all_wrong_settings_are_told_at_once(wire: Wire, body: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(HttpError) as refused:
        wire.decode(body)
    told = refused.value.detail
    both = ["seed is", "top_k is"] if "seed" in body else []
    assert [name for name in [*named, *both, "temperature is", "top_p is"] if name not in told] == []
    assert refused.value.code == "invalid_value"
    assert told.count("top_p is 2, but it must be from 1e-06 to 1.") == 1
