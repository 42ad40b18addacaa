"""The same GRPO work in TRL's GRPOTrainer and here, in one run.

Model, prompts, samples, token limits, number format, reward (length of the text) and one AdamW step per rollout are
the same. Each contender runs in a process of its own; rollgrad before and after TRL. The first step of each process
is not counted. Last line: `ratio R`, TRL's median seconds a step over ours.

    python benchmarks/versus_trl.py --steps 3
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import tyro
from attrs import asdict, define

LEARNING_RATE = 1e-6


@define(kw_only=True)
class Work:
    """What both do."""

    model: Path = Path(".models/SmolLM2-135M-Instruct")
    """Model directory; `python examples/sums.py` unpacks this one."""
    prompts: int = 8
    """Prompts per step."""
    samples: int = 8
    """Samples of each prompt."""
    shots: int = 8
    """Worked examples before each question: 0 makes prompts of about 40 tokens, 8 of about 140."""
    new_tokens: int = 32
    """Sampled tokens per reply, at most."""
    steps: int = 3
    """Counted steps of each process."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute format; auto is what the hardware multiplies fastest."""
    contender: Literal["both", "rollgrad", "trl"] = "both"
    """Run one alone; used by this script itself."""


def questions(count: int, shots: int) -> list[str]:
    def pair(i: int) -> tuple[int, int]:
        return 1 + i % 20, 1 + 7 * i % 20

    def example(i: int) -> str:
        a, b = pair(i)
        return f"What is {a} + {b}? The answer is {a + b}.\n"

    def question(i: int) -> str:
        a, b = pair(i)
        return "".join(example(31 * i + shot) for shot in range(shots)) + f"What is {a} + {b}?"

    return [question(i) for i in range(count)]


def rollgrad_steps(work: Work) -> dict[str, Any]:
    import rollgrad
    from rollgrad.application.config import DType, Estimator, RLConfig

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        total = work.prompts * (work.steps + 1)
        data.write_text("".join(json.dumps({"input": text}) + "\n" for text in questions(total, work.shots)))
        config = RLConfig()
        config.actor.model_name_or_path = str(work.model)
        config.actor.dtype = DType(work.dtype)
        config.actor.adam.lr = LEARNING_RATE
        config.algo.advantage.estimator = Estimator.GROUP_NORM
        config.data.prompt_dataset = str(data)
        config.rollout.batch_size = work.prompts
        config.rollout.n_samples_per_prompt = work.samples
        config.rollout.max_new_tokens = work.new_tokens
        config.train.max_steps = work.steps + 1
        config.ckpt.output_dir = str(Path(folder) / "run")
        config.logger.console = False

        def length(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
            return [len(q) - len(p) for q, p in zip(queries, prompts, strict=True)]

        result = rollgrad.train(config, reward=length)
        lines = [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": [line["time/step_s"] for line in lines][1:],
        "length": statistics.mean(line["rollout/response_length_mean"] for line in lines),
    }


def trl_steps(work: Work) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    dtype = compute_dtype(work)
    rows = [
        {"prompt": [{"role": "user", "content": text}]}
        for text in questions(work.prompts * (work.steps + 1), work.shots)
    ]
    seconds: list[float] = []
    started = 0.0

    class Timer(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal started
            started = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.monotonic() - started)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            reward_funcs=lambda completions, **_: [float(len(c[0]["content"])) for c in completions],
            train_dataset=Dataset.from_list(rows),
            callbacks=[Timer()],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=work.prompts * work.samples,
                num_generations=work.samples,
                max_completion_length=work.new_tokens,
                max_steps=work.steps + 1,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                beta=0.0,
                temperature=1.0,
                bf16=dtype == torch.bfloat16,
                gradient_checkpointing=False,
                use_cpu=not torch.cuda.is_available(),
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        trainer.train()
    history = trainer.state.log_history
    lengths = [entry["completions/mean_length"] for entry in history if "completions/mean_length" in entry]
    return {"seconds": seconds[1:], "length": statistics.mean(lengths)}


def compute_dtype(work: Work) -> Any:
    from rollgrad.adapters.torch.loading import default_device, resolve_dtype

    return resolve_dtype(work.dtype, default_device())


def run_alone(work: Work, contender: str) -> dict[str, Any]:
    """One contender in a fresh process."""
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in asdict(work).items() if k != "contender"]
    command = [sys.executable, __file__, *flags, f"--contender={contender}"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{contender:9} {answer['length']:5.1f} tokens a reply, seconds a step:",
        *(f"{s:.1f}" for s in answer["seconds"]),
    )
    return answer


def show_floor(work: Work, length: float) -> None:
    """The least time the work could take here, by bytes and FLOPs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks.machine import ModelCost, measure

    dtype = compute_dtype(work)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": questions(1, work.shots)[0]}], tokenize=False, add_generation_prompt=True
    )
    prompt = len(tokenizer(text)["input_ids"])
    machine, rows = measure(dtype), work.prompts * work.samples
    cost = ModelCost.of(AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype))
    replies = int(rows * length)
    padded, shared = rows * prompt + replies, work.prompts * prompt + replies
    generate = 2 * cost.body * work.prompts * prompt / machine.flops + length * cost.decode_floor(machine, rows)
    print(f"\n{dtype}, {torch.get_num_threads()} threads, measured now:", end=" ")
    print(f"{machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s")
    for title, seconds in (
        ("generation", generate),
        (f"update, each prompt once ({shared} tokens)", cost.update(shared, replies) / machine.flops),
        (f"update, each sample whole ({padded} tokens)", cost.update(padded, replies) / machine.flops),
    ):
        print(f"floor of {title:42} {seconds:6.2f} s")


def main(work: Work) -> None:
    if work.contender != "both":
        steps = {"rollgrad": rollgrad_steps, "trl": trl_steps}[work.contender]
        print(json.dumps(steps(work)))
        return
    ours, theirs, again = (run_alone(work, name) for name in ("rollgrad", "trl", "rollgrad"))
    show_floor(work, statistics.mean([ours["length"], again["length"]]))
    mine, trl = statistics.median(ours["seconds"] + again["seconds"]), statistics.median(theirs["seconds"])
    print(f"\nmedian seconds a step: rollgrad {mine:.2f}, TRL {trl:.2f}")
    print(f"ratio {trl / mine:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
