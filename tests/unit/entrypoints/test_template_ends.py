"""A chat template that ends replies with no token of the model's is told before the first step."""

import copy
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.entrypoints.composition.rl.data import make_row_source

LLAMA = (
    "{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>{% endif %}"
)


@pytest.mark.parametrize(("settings", "warns"), [({}, True), ({"apply_chat_template": False}, False)])
def test_a_template_of_another_family_is_told(tiny_tokenizer: Any, settings: dict[str, Any], warns: bool) -> None:
    """Its end of a reply is no token here, so that replies do not end."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = LLAMA
    config = RLConfig()
    config.rollout.engine = Engine.VLLM  # which compares lengths with the model's positions by itself
    config.data = evolve(config.data, **settings)
    stops = evolve(config, rollout=evolve(config.rollout, stop_strings=("<|eot_id|>",)))
    with capture_logs() as logs:
        make_row_source([{"input": "3+4?"}], config, TemplateCodec(tokenizer), None)
    (told,) = [entry["event"] for entry in logs if entry["log_level"] == "warning"] or [""]
    assert ("'<|eot_id|>'" in told and "--data.chat_template" in told) is warns
    with capture_logs() as logs:
        make_row_source([{"input": "3+4?"}], stops, TemplateCodec(tokenizer), None)
        make_row_source([{"input": "3+4?"}], config, TemplateCodec(tiny_tokenizer), None)
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
