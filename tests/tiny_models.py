"""Models of transformers that are tiny and random, and directories with them."""

from pathlib import Path
from typing import Any

LONG = 450
"""Tokens of a request that is still sampled seconds later, and fits into the 512 of the small Llamas."""


def tiny_model(name: str, tokenizer: Any, *, seed: int = 0, **settings: Any) -> Any:
    """A model of the transformers class `name`, with two layers and grouped heads; `settings` are of its config."""
    import torch
    import transformers

    torch.manual_seed(seed)
    family = getattr(transformers, name)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,  # outputs that differ clearly from token to token
        "pad_token_id": tokenizer.pad_token_id,
    }
    return family(family.config_class(**{**sizes, **settings})).eval()


def saved(model: Any, tokenizer: Any, path: Path) -> Path:
    """`path`, where model and tokenizer lie."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
