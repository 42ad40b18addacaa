"""Models of transformers that are tiny and random, their tokenizer, and directories with them."""

from pathlib import Path
from typing import Any

LONG = 450
"""Tokens of a request that is still sampled seconds later, and fits into the 512 of the small Llamas."""
SHARE = 0.1
"""Share of a GPU's memory for a small model in vLLM, beside other engines that tests have started."""


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


def make_tiny_tokenizer(*, spare: bool = True) -> Any:
    """A byte-level BPE tokenizer of a few hundred tokens with a ChatML template; <|im_end|> ends a reply, and pads
    unless there is a `spare` token for that."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*(["<|pad|>"] if spare else []), "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>" if spare else "<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_other_tokenizer() -> Any:
    """A byte-level BPE tokenizer with other tokens, other special ones and another template than the first: it begins a
    sequence with a token of its own, and trims messages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|begin|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace("The answer", "an swer is") for text in TRAINING_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=(
            "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )


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
    """`path`, where model and tokenizer, or the processor of images that has one, lie. transformers' own way imports
    DeepSpeed, which takes a second of each process."""
    from rollgrad.adapters.models.torch.loading.saving import save_pretrained

    save_pretrained(model, tokenizer, path)
    return path


def tiny_llama(tokenizer: Any, path: Path, *, head_dim: int, positions: int = 512) -> Path:
    """Saves a Llama of two layers with grouped heads, random weights and `tokenizer` to `path`; vLLM's attention takes
    heads of 32 numbers or more on a CPU."""
    model = tiny_model(
        "LlamaForCausalLM",
        tokenizer,
        hidden_size=64,
        intermediate_size=128,
        head_dim=head_dim,
        max_position_embeddings=positions,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return saved(model, tokenizer, path)
