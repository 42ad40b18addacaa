"""Fixtures that many tests share. Tests never reach the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINING_TEXT = (
    "What is 3 plus 4? The answer is 7.",
    "Question: what is the sum of 12 and 30?\nAnswer: 42",
    "system user assistant You are a helpful assistant.",
    "The quick brown fox jumps over the lazy dog.",
)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of a few hundred tokens with a ChatML template; <|im_end|> ends a reply."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(autouse=True, scope="session")
def _datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps what `datasets` caches out of the user's home."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(tmp_path_factory.mktemp("datasets-cache"))
