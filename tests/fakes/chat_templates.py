"""Chat templates of real model families, on a small tokenizer that knows their special tokens."""

import copy
import re
from importlib.resources import files
from typing import Any

TEMPLATES = (
    "smollm2",
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "qwen3_5_think",
    "llama3_1",
    "llama3_2",
    "gptoss",
    "deepseekv3",
    "glm4moe",
    "gemma3",
    "gemma4",
    "phi3",
    "nemotron_3_nano",
    "lfm2_v2",
    "cohere2",
)
"""As TRL names them; `smollm2` is the tiny tokenizer's own."""

SPECIAL = re.compile(r"<\|[A-Za-z_]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜]+｜>|<start_of_turn>|<end_of_turn>")
"""Texts that are tokens of their own in these families' vocabularies."""


def tokenizer_with(name: str, tiny_tokenizer: Any) -> Any:
    """A copy of `tiny_tokenizer` with the template `name` and its special tokens."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    if name == "smollm2":
        return tokenizer
    template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.bos_token = "<|bos|>"
    return tokenizer


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of all special tokens."""
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
