"""Models are exact or refused in a sentence: representatives of all kinds, and a table that is current.

`scripts/model_table.py` examines every type.
"""

import pytest

from tests.model_sweep import TABLE, examine, types

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
    "musicgen",
)
"""For each way to be exact, and each reason for a refusal."""


def rows() -> dict[str, str]:
    _, head, rest = TABLE.read_text(encoding="utf-8").partition("| type |")
    lines = (head + rest).splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_type_is_what_the_table_says(name: str) -> None:
    finding = examine(name)
    assert not finding.wrong, finding
    assert finding.row == rows()[name], "run scripts/model_table.py"


def test_the_table_has_every_type_of_the_installed_transformers() -> None:
    assert [*rows()][1:] == types(), "run scripts/model_table.py"
