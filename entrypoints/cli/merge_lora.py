"""`rollgrad merge-lora`: LoRA adapters merged into the model that they were trained beside."""

import sys
from pathlib import Path

from attrs import define

from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.errors import ConfigurationError, raise_together


@define(kw_only=True)
class MergeLoraArguments:
    """Merges LoRA adapters, saved by rollgrad, peft or OpenRLHF, into the model that they were trained beside, and
    writes it with its tokenizer as safetensors. What is written is read back, and compared with model and adapters."""

    adapter: str = ""
    """Directory or hub name of the adapters; required."""
    output: Path | None = None
    """Directory that is made; required. One that is there already is refused."""
    model: str | None = None
    """Directory or hub name of the model that they were trained beside; default: the one that they name."""
    dtype: DType = DType.AUTO
    """Number format of the merged weights; auto is the model's own."""
    load_in_4bit: bool = False
    """The adapters were trained beside weights in 4 bits (QLoRA): the model's weights are quantised as there, and the
    dequantised ones merged. A model whose files are in 4 bits is dequantised without this flag."""
    reward_model: bool = False
    """The model is a reward model (a sequence classifier with one label) even where the adapters do not say so."""


def merge(arguments: MergeLoraArguments) -> None:
    """Merges, and prints where the merged model is.

    Raises:
        RollgradError: a flag is wrong, or the adapters cannot be merged.
    """
    missing = {"adapter": "the directory of the adapters", "output": "the directory of the merged model"}
    raise_together(
        [
            ConfigurationError(f"--{flag} is not set: name {what}.")
            for flag, what in missing.items()
            if not getattr(arguments, flag)
        ]
    )
    assert arguments.output is not None
    import torch

    from rollgrad.adapters.models.torch.loading.merging import TEXTS, merge_lora

    merged = merge_lora(
        arguments.adapter,
        arguments.output,
        model=arguments.model,
        dtype=None if arguments.dtype is DType.AUTO else getattr(torch, arguments.dtype.value),
        load_in_4bit=arguments.load_in_4bit,
        reward_model=arguments.reward_model,
    )
    what = "scores" if merged.reward_model else "log-probs"
    sys.stderr.write(
        f"{merged.layers} layers of {merged.base} merged in {merged.dtype}; {what} of {len(TEXTS)} texts differ by "
        f"{merged.difference:.2g} on average; tokenizer and template of {merged.tokenizer}\n"
    )
    if merged.dequantised:
        sys.stderr.write(f"{merged.base} was in 4 bits and is dequantised: the merged model is not the quantised one\n")
    elif merged.trained_in_4bit:
        sys.stderr.write(
            f"warning: the adapters were trained beside {merged.base} in 4 bits, and are merged into its full weights: "
            "the merged model is not quite the one that was trained, which --load_in_4bit makes\n"
        )
    sys.stdout.write(f"{arguments.output}\n")
