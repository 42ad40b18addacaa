"""Loads transformers models for packed training, with errors a user can act on."""

from pathlib import Path
from typing import Any

import torch

from rollgrad.adapters.torch.allocator import keep_freed_memory
from rollgrad.adapters.torch.attention import ForestAttention, install_attention
from rollgrad.adapters.torch.layout import prefill_layout
from rollgrad.adapters.torch.quantized import finish_loading, four_bits
from rollgrad.domain.errors import CheckpointError, ConfigurationError

PROBE_TOKENS = 8
"""Length of the sequences on which a freshly loaded model is compared with itself."""

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of the comparison, as a share of the largest logit: about 25 rounding steps of the format."""


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively (CUDA, AMX, AVX512-BF16), else float32: without
    native support a CPU's bfloat16 product is several times slower than its float32 one. float16 is never chosen by
    itself: not every model's activations fit into it."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    native = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if device.type == "cuda"
        else torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
    return torch.bfloat16 if native else torch.float32


def default_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_causal_lm(
    name_or_path: str, *, dtype: torch.dtype, device: torch.device, flag: str, load_in_4bit: bool = False
) -> Any:
    """An `AutoModelForCausalLM` in eval mode with packed attention installed.

    Args:
        name_or_path: hub name or directory.
        dtype: compute format of the weights.
        device: where they go.
        flag: command-line flag to name in errors.
        load_in_4bit: its linear layers but the head are quantised (`quantized.py`), and cannot be trained.

    Raises:
        CheckpointError: there is no such model, it cannot be read, is quantised, or it is adapters to another one.
        ConfigurationError: packed training cannot compute what the model computes, or it has no 4-bit form.
        MissingExtraError: quantising needs a package that is not installed.
    """
    from transformers import AutoModelForCausalLM

    if device.type == "cpu":
        keep_freed_memory()
    quantised = four_bits(dtype, device) if load_in_4bit else {}
    model = _from_pretrained(AutoModelForCausalLM, name_or_path, flag, dtype=dtype, **quantised).to(device).eval()
    finish_loading(model, name_or_path, flag)
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, which holds adapters beside a model of its own: name a model that has them "
            "merged, as rollgrad saves it one directory above."
        )
    with torch.no_grad():
        _install_and_compare(model)
    return model


def load_critic(
    name_or_path: str, *, dtype: torch.dtype, device: torch.device, flag: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(a model as `load_causal_lm` gives it, the scalar head that its checkpoint holds).

    A critic saved by rollgrad has `value_head.safetensors`; a reward model (sequence classification with one label) has
    `score`. Other checkpoints have no head: the dict is then empty.

    Raises:
        CheckpointError, ConfigurationError: as `load_causal_lm`, or the head has several outputs.
    """
    model = load_causal_lm(name_or_path, dtype=dtype, device=device, flag=flag)
    head = _scalar_head(name_or_path)
    if head and head["weight"].shape != (1, model.config.hidden_size):
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, whose head has the shape {tuple(head['weight'].shape)}: a critic needs one "
            f"output for {model.config.hidden_size} inputs."
        )
    return model, head


def _scalar_head(name_or_path: str) -> dict[str, torch.Tensor]:
    import json

    from safetensors import safe_open
    from transformers.utils import cached_file

    def find(file: str) -> str | None:
        found: str | None = cached_file(name_or_path, file, _raise_exceptions_for_missing_entries=False)
        return found

    files = {"value_head.": find("value_head.safetensors"), "score.": find("model.safetensors")}
    index = find("model.safetensors.index.json")
    if index is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        files["score."] = find(shards["score.weight"]) if "score.weight" in shards else None
    for prefix, file in files.items():
        if file is not None:
            with safe_open(file, framework="pt") as tensors:
                head = {
                    name.removeprefix(prefix): tensors.get_tensor(name)
                    for name in tensors.keys()  # noqa: SIM118 (no mapping)
                    if name.startswith(prefix)
                }
            if head:
                return head
    return {}


def _install_and_compare(model: Any) -> None:
    """Installs packed attention, and checks on two short sequences that the model still computes the same: scaled or
    capped logits, recurrent states and the like live outside the attention, where no keyword betrays them."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    first = tuple(range(PROBE_TOKENS))
    second = first[::-1]
    expected_TV = model(torch.tensor([second], device=device)).logits[0].float()
    if dtype == torch.float16 and not bool(expected_TV.isfinite().all()):
        raise ConfigurationError(
            f"actor.dtype is float16, which ends at 65504, but {type(model).__name__} computes larger numbers: set "
            "--actor.dtype bfloat16."
        )
    install_attention(model)
    layout, _ = prefill_layout([first, second])
    try:
        hidden_MH = model.base_model(
            input_ids=layout.tokens_M[None].to(device),
            position_ids=layout.positions_M[None].to(device),
            use_cache=False,
            attention_plan=ForestAttention(layout.nodes, device=device, dtype=dtype),
        ).last_hidden_state[0]
    except TypeError as error:
        raise _not_packable(model, str(error)) from error
    found_TV = model.get_output_embeddings()(hidden_MH[PROBE_TOKENS:]).float()
    allowed = PROBE_TOLERANCE[dtype] * float(expected_TV.abs().max())
    gap = float((found_TV - expected_TV).abs().max())
    if not gap <= allowed:
        raise _not_packable(model, f"logits differ by {gap:.2g}, more than rounding's {allowed:.2g}")


def _not_packable(model: Any, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(model).__name__} gives other results when sequences are packed without padding ({reason}); choose "
        "another --actor.model_name_or_path."
    )


def load_tokenizer(name_or_path: str, *, flag: str) -> Any:
    """The model's tokenizer.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, name_or_path, flag)


def load_positions(name_or_path: str) -> int | None:
    """Tokens that the model has positions for; None where its settings name no number.

    Raises:
        CheckpointError: there is no such model.
    """
    from transformers import AutoConfig

    settings = _from_pretrained(AutoConfig, name_or_path, "--actor.model_name_or_path").get_text_config()
    return getattr(settings, "max_position_embeddings", None)


def load_generation_settings(name_or_path: str) -> Any:
    """The checkpoint's `GenerationConfig`, or what its model's settings say of generation."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(name_or_path)
    except OSError:
        config = _from_pretrained(AutoConfig, name_or_path, "--actor.model_name_or_path")
        return GenerationConfig.from_model_config(config)


def _from_pretrained(factory: Any, name_or_path: str, flag: str, **kwargs: Any) -> Any:
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1
    path = Path(name_or_path).expanduser()
    if looks_local and "/" in name_or_path and not path.exists():
        raise CheckpointError(f"{flag} is {name_or_path!r}: there is no such directory.")
    try:
        return factory.from_pretrained(str(path) if path.exists() else name_or_path, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, which cannot be loaded as a Hugging Face model: {first_line}"
        ) from error
