"""Models are exact or refused in a sentence: representatives of all kinds, and a list that is current.

`scripts/model_table.py` examines every type.
"""

import pytest

from tests.model_sweep import EVERY_TYPE, NEWEST, documented, examine, types

REPRESENTATIVES = (
    "llama",
    "llama, dynamic rope",
    "phi3, longrope",
    "gemma3_text, capped logits",
    "gemma4_text",
    "granite, scaled",
    "cohere2",
    "qwen2_moe",
    "phimoe",
    "deepseek_v2",
    "deepseek_v3",
    "minicpm3",
    "glm4_moe",
    "jetmoe",
    "diffllama",
    "hrm_text",
    "opt",
    "llama4_text, no chunks",
    "llama4_text",
    "gemma2",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "lfm2",
    "nemotron_h",
    "jamba",
    "minimax",
    "bloom",
    "stablelm",
    "moshi",
    "roberta",
    "deepseek_v32",
    "reformer",
    "whisper",
    "musicgen",
)
"""For each way to be exact, and each reason for a refusal."""


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_type_is_what_the_documents_say(name: str) -> None:
    finding = examine(name)
    assert not finding.wrong, finding
    assert finding.outcome == documented(EVERY_TYPE)[name], "run scripts/model_table.py"


def test_the_documents_list_every_type_of_the_installed_transformers() -> None:
    assert not {*types()} - {*documented(EVERY_TYPE), *documented(NEWEST)}, "run scripts/model_table.py"
