"""SmolLM2 as a judge of sums: a reward model, fine-tuned on right and wrong replies to the questions of the demo."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.torch.allocator import keep_freed_memory
from rollgrad.adapters.torch.loading import resolve_dtype
from rollgrad.adapters.torch.reward_model import RewardModel

DATA = Path(__file__).resolve().parents[1] / "examples" / "data"
STEPS, BATCH, LR, SEED = 40, 32, 1e-4, 1
TRAINED_LAYERS = 10
"""The upper third of the model: the rest knows numbers already, and its backward passes would take most of the time."""

ANSWERS = ("{a} + {b} = {c}", "{a} + {b} = {c}", "{a} + {b} equals {c}", "{a} + {b} is {c}", "The sum is {c}", "{c}")
TAILS = ("", "", ".", " in", "\n", " \n\n", ",", ". The")
EVASIONS = (
    "To add {a} and {b}, you",
    "To calculate {a} + {b}, we",
    "When you add {a} + {b},",
    "{a} + {b} is a multiple of",
    "The sum of {a} and {b} is",
    "{a} + {b} = ?",
    "In mathematics, this is a sum of",
    "Think of it this way: you have {a}",
)
"""Replies of the untrained model that come to no answer."""


def replies(question: str, label: str, rng: random.Random) -> tuple[str, str]:
    """A right and a wrong reply."""
    a, b = (int(word.strip("?")) for word in question.split() if word.strip("?").isdigit())
    right = int(label)
    offset = rng.choice((-10, -3, -2, -1, 1, 2, 3, 10, rng.randint(4, 20)))
    numbers = {"a": a, "b": b}
    wrong = rng.choice(EVASIONS) if rng.random() < 0.3 else rng.choice(ANSWERS) + rng.choice(TAILS)
    answer = rng.choice(ANSWERS) + rng.choice(TAILS)
    return answer.format(**numbers, c=right), wrong.format(**numbers, c=right + offset)


def judged_texts(file: str, tokenizer: Any, rng: random.Random) -> list[tuple[str, float]]:
    """Every question of a file with a right (1) and with a wrong (0) reply, as reward models read them."""
    texts: list[tuple[str, float]] = []
    for row in map(json.loads, (DATA / file).read_text().splitlines()):
        chat = [{"role": "user", "content": row["input"]}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        right, wrong = replies(row["input"], row["label"], rng)
        texts += [(prompt + right, 1.0), (prompt + wrong, 0.0)]
    return texts


def batches(tokenizer: Any, rng: random.Random) -> Iterator[list[tuple[str, float]]]:
    """Without end; every pass over the questions has new replies."""
    while True:
        texts = judged_texts("sums_train.jsonl", tokenizer, rng)
        rng.shuffle(texts)
        yield from (texts[start : start + BATCH] for start in range(0, len(texts) - BATCH + 1, BATCH))


def train_reward_model(base: str, path: str) -> float:
    """Saves the reward model; its accuracy on one right and one wrong reply to each held-out question."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = torch.device("cpu")
    dtype = resolve_dtype("auto", device)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    reader = RewardModel(model, tokenizer)
    keep_freed_memory()
    for lower in (model.base_model.embed_tokens, *model.base_model.layers[:-TRAINED_LAYERS]):
        lower.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    for step, batch in zip(range(STEPS), batches(tokenizer, rng), strict=False):
        rows = [torch.tensor(reader.encode(text).tokens) for text, _ in batch]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            hidden: Tensor = model.base_model(tokens, attention_mask=mask)[0]
        scores = model.score(hidden[torch.arange(len(rows)), lengths - 1].float())[:, 0]
        labels = torch.tensor([label for _, label in batch])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 9:
            print(f"reward model: step {step + 1}, loss {loss.item():.2f}", flush=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    judge = RewardModel.load(path, dtype=dtype, device=device, flag="path")
    held_out = judged_texts("sums_test.jsonl", tokenizer, random.Random(SEED))
    found = judge.score([text for text, _ in held_out])
    return sum((score > 0) == (label > 0) for score, (_, label) in zip(found, held_out, strict=True)) / len(held_out)
