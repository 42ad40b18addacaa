"""The work of `versus_trl.py sft` and `versus_trl.py dpo`, and who does it."""

import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import define, evolve

from benchmarks.machine import ModelCost, measure
from benchmarks.smoke import smoke_model
from benchmarks.turns import Turns, alternate, keep_turns
from rollgrad.adapters.models.torch.loading.loading import resolve_dtype

LEARNING_RATE = 1e-6
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "as", "with", "his", "they", "at")
"""Words of one token each, with the space before them."""
PROMPT_SHARE = 4
"""One in so many words of a row for supervised fine-tuning is the prompt's."""


@define(kw_only=True)
class Work:
    """The work that both do."""

    model: Path = Path(".models/SmolLM2-135M-Instruct")
    """Model directory; `make demo` unpacks this one."""
    steps: int = 3
    """Counted steps of each contender."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute format; auto is what the processor multiplies natively."""
    smoke: bool = False
    """Smallest work on a tiny random model, to see that the script runs."""

    @property
    def all_steps(self) -> int:
        """One to warm up, the counted ones, and one that nobody starts, so that every counted step ends alike."""
        return self.steps + 2

    def torch_dtype(self) -> torch.dtype:
        """The format as both take it."""
        return resolve_dtype(self.dtype, torch.device("cpu"))

    def trl_arguments(self, folder: str) -> dict[str, Any]:
        """Returns the arguments that all of TRL's trainers take here."""
        return {
            "output_dir": folder,
            "max_steps": self.all_steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "bf16": self.torch_dtype() == torch.bfloat16,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }


@define(kw_only=True)
class Examples(Work):
    """The work of the trainers over examples. A step has all rows, so that every step of both is the same work."""

    task: Literal["sft", "dpo"]
    """The trainer."""
    rows: int = 16
    """Rows per step; of pairs half as many."""
    longest: int = 320
    """Words of the longest row; of a pair of the prompt with one reply, half of them each."""
    spread: float = 10.0
    """Longest row over shortest; lengths are spaced by a constant factor. 1 makes all alike."""
    trl_rows: int = 8
    """Rows or pairs that TRL pads to one length, and puts through the model together: its default."""
    precompute: bool = False
    """Whether TRL computes the reference's log-probs before the first step, as rollgrad does; TRL's default is not."""

    @property
    def batch(self) -> int:
        """Rows or pairs of a step."""
        return self.rows if self.task == "sft" else self.rows // 2

    def data(self) -> list[dict[str, str]]:
        """Returns the rows: `prompt` with `completion`, or with `chosen` and `rejected`."""
        words = random.Random(0)

        def text(count: float) -> str:
            return "".join(f" {words.choice(WORDS)}" for _ in range(max(2, round(count))))

        lengths = [self.longest / math.pow(self.spread, place / max(1, self.batch - 1)) for place in range(self.batch)]
        words.shuffle(lengths)
        if self.task == "dpo":
            return [
                {"prompt": text(length / 2), "chosen": text(length / 2), "rejected": text(length / 2)}
                for length in lengths
            ]
        return [
            {"prompt": text(length / PROMPT_SHARE), "completion": text(length - length / PROMPT_SHARE)}
            for length in lengths
        ]


def _done(tokens: float, trained: float) -> str:
    return f"{tokens:.0f} tokens, {trained:.0f} of them trained,"


def rollgrad_contender(work: Examples, pipe: Connection) -> None:
    """Trains, one step a turn; the first word is how many seconds the reference took."""
    from dependency_injector import providers

    from rollgrad.application.settings.dpo import DPORun
    from rollgrad.application.settings.sections.actor import DType
    from rollgrad.application.settings.sft import SFTRun
    from rollgrad.entrypoints.composition.offline.dpo import dpo_container
    from rollgrad.entrypoints.composition.offline.sft import sft_container

    turns = Turns(pipe)

    class Sink:
        """Receives the metrics of each step when it is over."""

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            turns.wait(_done(metrics["train/tokens"], metrics["train/trained_tokens"]))

        def close(self) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in work.data()))
        config = SFTRun() if work.task == "sft" else DPORun()
        config.actor.model_name_or_path = str(work.model)
        config.actor.dtype = DType(work.dtype)
        config.actor.adam.lr = LEARNING_RATE
        config.data.dataset = str(data)
        config.data.apply_chat_template = False
        config.data.cache_dir = folder
        config.train.batch_size = work.batch
        config.train.max_steps = work.all_steps
        config.ckpt.output_dir = folder
        container = sft_container(config) if isinstance(config, SFTRun) else dpo_container(config)
        container.sink.override(providers.Object(Sink()))
        container.policy()
        started = time.perf_counter()
        run = container.run()  # computes the reference's log-probs, if there is one
        turns.wait(f"{time.perf_counter() - started:.1f}")
        asyncio.run(run.run())


def trl_contender(work: Examples, pipe: Connection) -> None:
    """Trains, one step a turn."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    turns, words = Turns(pipe), ["ready"]

    class Gate(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.wait(words[-1])
            words.append(count())

    def count() -> str:
        rows = list(trainer.train_dataset)
        if work.task == "sft":
            labels = [label for row in rows for label in row["labels"]]
            return _done(len(labels), sum(label != -100 for label in labels))
        replies = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)
        return _done(2 * sum(len(row["prompt_ids"]) for row in rows) + replies, replies)

    per_pass = min(work.trl_rows, work.batch)
    with tempfile.TemporaryDirectory() as folder:
        common = {
            **work.trl_arguments(folder),
            "per_device_train_batch_size": per_pass,
            "gradient_accumulation_steps": work.batch // per_pass,
            "max_length": None,
        }
        kind, settings = SFTTrainer, SFTConfig(**common) if work.task == "sft" else None
        if settings is None:
            kind, settings = DPOTrainer, DPOConfig(**common, precompute_ref_log_probs=work.precompute)
        trainer = kind(
            model=AutoModelForCausalLM.from_pretrained(work.model, dtype=work.torch_dtype()),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            train_dataset=Dataset.from_list(work.data()),
            callbacks=[Gate()],
            args=settings,
        )
        trainer.train()


def compare(work: Examples) -> None:
    """Runs both and prints what came of it; with `smoke` the smallest work."""
    small: dict[str, Any] = {"rows": 4, "longest": 12, "spread": 3.0, "steps": 1}
    with smoke_model() if work.smoke else nullcontext(work.model) as model:
        _compare(evolve(work, model=model, **small) if work.smoke else work)


def _compare(work: Examples) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, theirs = alternate(rollgrad_contender, trl_contender, work, work.steps)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    rows = [  # each reply has a token more, which ends it
        {name: len(tokenizer(text)["input_ids"]) + (name != "prompt") for name, text in row.items()}
        for row in work.data()
    ]
    distinct = sum(sum(row.values()) for row in rows)
    trained = distinct - sum(row["prompt"] for row in rows)
    dtype = work.torch_dtype()
    machine = measure(dtype, smoke=work.smoke)
    cost = ModelCost.of(AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype))
    floor = cost.update(distinct, trained) / machine.flops
    print(
        f"\nmeasured now in {str(dtype).removeprefix('torch.')} with {torch.get_num_threads()} threads: "
        f"{machine.flops / 1e9:.0f} GFLOP/s; rows of {min(sum(row.values()) for row in rows)} to "
        f"{max(sum(row.values()) for row in rows)} tokens"
    )
    print(f"floor: one forward and backward pass of {distinct} distinct tokens {floor:.2f} s")
    for contender in (ours, theirs):
        print(f"{contender.name:9} median {contender.median:.2f} s a step, {contender.median / floor:.1f} x the floor")
    if work.task == "dpo":
        before = float(ours.ready)
        print(
            f"rollgrad computed the reference's log-probs once, in {before:.1f} s before the first step: with that in "
            f"each step the ratio would be {theirs.median / (ours.median + before):.2f}"
        )
    print(f"ratio {theirs.median / ours.median:.2f}")
    if not work.smoke:
        keep_turns(f"versus_trl_{work.task}", work, ours, theirs, floor)
