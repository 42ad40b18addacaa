"""TRL's trainers and rollgrad at equal work, in one run.

Each contender lives in a process of its own and waits while the other takes its step; the first step of each is not
counted. Model, rows, AdamW step and number format are the same. Last line: `ratio R`, TRL's median seconds a step over
rollgrad's.

    python benchmarks/versus_trl.py grpo --steps 3

GRPO, where the reward is the length of the reply; neither may end a reply early, so both sample and train on the same
number of tokens. Without a name the work is this.

    python benchmarks/versus_trl.py sft
    python benchmarks/versus_trl.py dpo

Supervised fine-tuning on rows whose lengths spread 10:1, and DPO on pairs whose prompts are as long as their replies
(`versus_trl_examples.py`).
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tyro
from attrs import define, evolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import ModelCost, measure
from benchmarks.smoke import smoke_model
from benchmarks.turns import Contender, Turns, alternate, keep_turns
from benchmarks.versus_trl_examples import LEARNING_RATE, Examples, Work
from benchmarks.versus_trl_examples import compare as compare_examples

SMALLEST, NUMBERS = 10, 40
"""Summands are from 10 to 49: two digits each and in their sum, so that all prompts have one length."""


@define(kw_only=True)
class Rollouts(Work):
    """The work of GRPO."""

    prompts: int = 8
    """Prompts per step."""
    samples: int = 8
    """Samples of each prompt."""
    shots: int = 8
    """Worked examples before each question: 0 makes prompts of 40 tokens, 8 of about 180."""
    new_tokens: int = 32
    """Sampled tokens per reply."""
    trl_parts: int = 4
    """Forward and backward passes that TRL divides a step into: 64 samples of 212 tokens at once need over 16 GB."""

    @property
    def rows(self) -> int:
        """Replies per step."""
        return self.prompts * self.samples

    def questions(self) -> list[str]:
        """Distinct sums for the whole run."""
        return [
            "".join(f"{_sum(31 * i + shot)} The answer is {_answer(31 * i + shot)}.\n" for shot in range(self.shots))
            + _sum(i)
            for i in range(self.prompts * self.all_steps)
        ]


def _summands(i: int) -> tuple[int, int]:
    return SMALLEST + i % NUMBERS, SMALLEST + (i // NUMBERS + 7 * i) % NUMBERS


def _sum(i: int) -> str:
    a, b = _summands(i)
    return f"What is {a} + {b}?"


def _answer(i: int) -> int:
    return sum(_summands(i))


def worth(reply: str) -> float:
    """The reward: it differs within every group, so that no sample is without a gradient."""
    return float(len(reply))


def _done(tokens: float, samples: float) -> str:
    return f"{tokens:.0f} tokens generated, {samples:.0f} samples trained on"


def rollgrad_contender(work: Rollouts, pipe: Connection) -> None:
    """Trains, one step a turn."""
    from dependency_injector import providers

    from rollgrad.adapters.rewards.function import FunctionReward
    from rollgrad.application.settings.run import RLConfig
    from rollgrad.application.settings.sections.actor import DType
    from rollgrad.domain.episodes.generation import SamplingParams
    from rollgrad.entrypoints.composition.rl.container import rl_container

    turns = Turns(pipe)

    class Sink:
        """Receives the metrics of each step when it is over."""

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            tokens = metrics["rollout/response_length_mean"] * metrics["rollout/samples"]
            turns.wait(_done(tokens, metrics["policy/trained_share"] * metrics["rollout/samples"]))

        def close(self) -> None:
            pass

    def reward(completions: list[str]) -> list[float]:
        return [worth(completion) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"input": text}) + "\n" for text in work.questions()))
        config = RLConfig()
        config.actor.model_name_or_path = str(work.model)
        config.actor.dtype = DType(work.dtype)
        config.actor.adam.lr = LEARNING_RATE
        config.algo.advantage.estimator = "group_norm"
        config.data.prompt_dataset = str(data)
        config.rollout.batch_size = work.prompts
        config.rollout.n_samples_per_prompt = work.samples
        config.train.max_steps = work.all_steps
        config.ckpt.output_dir = folder
        container = rl_container(config)
        container.reward.override(providers.Object(FunctionReward(reward, timeout=config.reward.timeout)))
        container.sink.override(providers.Object(Sink()))
        params = SamplingParams(max_new_tokens=work.new_tokens, min_new_tokens=work.new_tokens)
        container.sampling.override(providers.Object(params))
        run = container.run()
        turns.wait("ready")
        asyncio.run(run.run())


def trl_contender(work: Rollouts, pipe: Connection) -> None:
    """Trains, one step a turn."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    turns, done = Turns(pipe), []

    class Gate(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.wait(done.pop() if done else "ready")

    def reward(completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        done.append(_done(sum(len(ids) for ids in completion_ids), len(completion_ids)))
        return [worth(completion[0]["content"]) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.model, dtype=work.torch_dtype()),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": text}]} for text in work.questions()]
            ),
            callbacks=[Gate()],
            args=GRPOConfig(
                **work.trl_arguments(folder),
                per_device_train_batch_size=work.rows // work.trl_parts,
                gradient_accumulation_steps=work.trl_parts,
                num_generations=work.samples,
                max_completion_length=work.new_tokens,
                generation_kwargs={"min_new_tokens": work.new_tokens},
                beta=0.0,
                temperature=1.0,
                shuffle_dataset=False,
            ),
        )
        trainer.train()


def print_floor(work: Rollouts, contenders: tuple[Contender, ...]) -> float:
    """Prints the least time that a step could take here, by bytes and FLOPs; returns it in seconds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = work.torch_dtype()
    chat = [{"role": "user", "content": work.questions()[0]}]
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    prompt = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    machine = measure(dtype, smoke=work.smoke)
    cost = ModelCost.of(AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype))
    replies, prompts = work.rows * work.new_tokens, work.prompts * prompt
    generation = cost.generation(
        machine, prompts=work.prompts, prompt_tokens=prompts, rows=work.rows, new_tokens=work.new_tokens
    )
    once = cost.update(prompts + replies, replies) / machine.flops
    whole = cost.update(work.rows * prompt + replies, replies) / machine.flops
    print(
        f"\nmeasured now in {str(dtype).removeprefix('torch.')} with {torch.get_num_threads()} threads: "
        f"{machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s; prompts of {prompt} tokens"
    )
    print(f"floor of generation                            {generation:6.2f} s")
    print(f"floor of the update, each prompt once          {once:6.2f} s")
    print(f"floor of the update, each sample with its own  {whole:6.2f} s")
    for contender in contenders:
        print(
            f"{contender.name:9} median {contender.median:.2f} s a step, "
            f"{contender.median / (generation + once):.1f} x the floor"
        )
    return generation + once


def compare(work: Rollouts) -> None:
    """Runs both and prints what came of it."""
    ours, theirs = alternate(rollgrad_contender, trl_contender, work, work.steps)
    floor = print_floor(work, (ours, theirs))
    print(f"ratio {theirs.median / ours.median:.2f}")
    if not work.smoke:
        keep_turns("versus_trl_grpo", work, ours, theirs, floor)


def compare_grpo(work: Rollouts) -> None:
    """Does the work of `grpo`, with `smoke` the smallest."""
    small: dict[str, Any] = {"prompts": 1, "samples": 2, "shots": 0, "new_tokens": 4, "steps": 1, "trl_parts": 1}
    with smoke_model() if work.smoke else nullcontext(work.model) as model:
        compare(evolve(work, model=model, **small) if work.smoke else work)


def main(words: list[str]) -> None:
    """Compares what the first word names; without one `grpo`, or with `--smoke` everything."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if words == ["--smoke"]:
        for name in ("grpo", "sft", "dpo"):
            main([name, *words])
    elif words and words[0] in ("sft", "dpo"):
        compare_examples(tyro.cli(Examples, args=["--task", *words], description=__doc__))
    else:
        compare_grpo(tyro.cli(Rollouts, args=words[words[:1] == ["grpo"] :], description=__doc__))


if __name__ == "__main__":
    main(sys.argv[1:])
