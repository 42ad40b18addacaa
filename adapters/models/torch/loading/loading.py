"""Loads transformers models for training, with errors a user can act on."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rollgrad.adapters.checkpoints.hub import find_model
from rollgrad.adapters.models.torch.allocator import keep_freed_memory
from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.adapters.models.torch.layers.images import model_factory
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare, usable_positions
from rollgrad.adapters.models.torch.loading.quantised import finish_loading, four_bits
from rollgrad.adapters.models.torch.loading.saving import PROCESSOR_FILES
from rollgrad.adapters.models.torch.loading.weight_shards import Shard, reading_by, sharded_loading, whole_layers
from rollgrad.domain.errors import CheckpointError, ConfigurationError

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
"""Ends of the names of classes that judge texts."""
LOADING = threading.RLock()
"""Lock of one load: transformers changes its own classes meanwhile, and two threads would leave them changed."""


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the number format of a name. `auto` is bfloat16 if the hardware multiplies it natively (CUDA, AMX,
    AVX512-BF16), else float32: without native support a CPU's bfloat16 product is several times slower than its float32
    one. `auto` is never float16, whose range is too small for some models' activations."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    native = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if device.type == "cuda"
        else torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
    return torch.bfloat16 if native else torch.float32


def default_device() -> torch.device:
    """Returns the first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_causal_lm(
    name_or_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    flag: str,
    load_in_4bit: bool = False,
    float32_head: bool = False,
    headless: bool = False,
    images: bool = False,
    shard: Shard | None = None,
) -> Any:
    """Returns a causal language model in eval mode with packed attention installed, or computed padded; it may see
    images, too.

    Args:
        name_or_path: hub name or directory.
        dtype: compute format of the weights.
        device: where they go.
        flag: command-line flag to name in errors.
        load_in_4bit: its linear layers but the head are quantised (`quantised.py`), and cannot be trained.
        float32_head: its logits are computed in float32.
        headless: its files need not have an output embedding, which is not used.
        images: it is to see images, if it can.
        shard: divides the weights over processes, each of which then reads its own share alone; not of a model in 4
            bits. All processes must load it together.

    Raises:
        CheckpointError: there is no such model, it cannot be read, lacks weights, is quantised, or it is adapters to
            another one.
        ConfigurationError: sequences computed together differ from the model's own results, or it has no 4-bit form.
        MissingExtraError: quantising needs a package that is not installed.
    """
    if device.type == "cpu" and shard is None:  # each layer that is put together would leave memory that is kept
        keep_freed_memory()
    if device.type == "cuda":  # for towers of images and the model's own passes, whose attention is theirs (kernels.py)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cudnn.allow_tf32 = False  # float32 is float32, also in the first layer of such a tower
    quantised = four_bits(dtype, device) if load_in_4bit else {}
    factory = _factory(name_or_path, flag, headless=headless, images=images)
    with LOADING, reading_by(_freezing), sharded_loading(None if load_in_4bit else shard):
        model, info = loaded_from(factory, name_or_path, flag, dtype=dtype, output_loading_info=True, **quantised)
    require_weights(model, info["missing_keys"], name_or_path, flag, headless=headless)
    model = model.to(device).eval()
    model.float32_head = float32_head
    if getattr(model.config, "image_token_id", None) is not None:
        files = processor_files(name_or_path)
        for part in (model, backbone(model)):  # the latter is what is saved of a model with another head
            setattr(part, PROCESSOR_FILES, files)
    finish_loading(model, name_or_path, flag)
    if hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, which holds adapters beside a model of its own: name a model that has them "
            "merged, as rollgrad saves it one directory above."
        )
    try:
        with whole_layers(model):
            install_and_compare(model)
    except FloatingPointError as error:
        remedy = (
            "float16 ends at 65504, so set --actor.dtype bfloat16"
            if dtype == torch.float16
            else f"its weights are broken, so choose another {flag}"
        )
        raise ConfigurationError(
            f"{flag} is {name_or_path!r}, whose logits are not finite in {str(dtype).removeprefix('torch.')}: {remedy}."
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{flag} is {name_or_path!r}, whose {type(model).__name__} cannot be trained exactly "
            f"({str(error).rstrip('.')}): choose another {flag}."
        ) from error
    return model


def _freezing(read: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that reads files as `read` does, and leaves parameters frozen that a model's own code freezes,
    such as the corrections of experts' scores in ERNIE 4.5 and AFMoE: transformers makes a trained parameter of all it
    reads."""

    def read_and_freeze(model: Any, *rest: Any, **named: Any) -> Any:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        found = read(model, *rest, **named)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        return found

    return read_and_freeze


def _factory(name_or_path: str, flag: str, *, headless: bool, images: bool) -> Any:
    """Returns the class of transformers that loads a model.

    Raises:
        CheckpointError: it is a reward model: its output embedding would be the input embedding, if the model shares
            them.
    """
    from transformers import AutoModelForCausalLM

    if not headless:
        refuse_classifier(name_or_path, flag)
    try:
        settings = load_model_config(name_or_path, flag=flag)
    except CheckpointError:  # adapters have no settings of their own; others are refused when they are loaded
        return AutoModelForCausalLM
    return model_factory(settings, images=images)


def refuse_classifier(name_or_path: str, flag: str) -> None:
    """Refuses a model that judges texts in the place of one that writes them, by its config.json alone; what has none
    passes.

    Raises:
        CheckpointError: it judges texts.
    """
    kinds: list[str] = []
    with suppress(CheckpointError):
        kinds = load_model_config(name_or_path, flag=flag).architectures or []
    if any(kind.endswith(CLASSIFIERS) for kind in kinds):
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, a {kinds[0]}, which judges texts and writes none: name a causal language "
            "model."
        )


def processor_files(name_or_path: str) -> dict[str, bytes]:
    """Returns the files of a model's processor, which a trained model needs as they are."""
    from transformers.utils import cached_file

    names = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    found = {name: cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False) for name in names}
    return {name: Path(path).read_bytes() for name, path in found.items() if path is not None}


def require_weights(model: Any, missing: Iterable[str], name_or_path: str, flag: str, *, headless: bool) -> None:
    """Refuses a model whose missing weights transformers would fill with random numbers.

    Args:
        model: the model.
        missing: names of weights that its files lack.
        name_or_path: directory or hub name of the model, which `flag` sets.
        flag: setting that names it, for errors.
        headless: whether it needs no output embedding.

    Raises:
        CheckpointError: the files lack weights.
    """
    head = model.get_output_embeddings()
    of_head = {name for name, part in model.named_parameters() if head is not None and part is head.weight}
    lacking = sorted(set(missing) - (of_head if headless else set()))
    if lacking:
        more = f" and {len(lacking) - 3} others" if len(lacking) > 3 else ""
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, whose files lack weights of {type(model).__name__} "
            f"({', '.join(lacking[:3])}{more}), which would be random: name a causal language model."
        )


def load_critic(
    name_or_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    flag: str,
    load_in_4bit: bool = False,
    images: bool = False,
    shard: Shard | None = None,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a model as `load_causal_lm` does, and the scalar head in its checkpoint.

    A critic saved by rollgrad has `value_head.safetensors`; a reward model (sequence classification with one label) has
    `score`. Other checkpoints have no head: the dict is then empty.

    Raises:
        CheckpointError, ConfigurationError: as `load_causal_lm`, or the head has several outputs.
    """
    from safetensors import SafetensorError

    model = load_causal_lm(
        name_or_path,
        dtype=dtype,
        device=device,
        flag=flag,
        load_in_4bit=load_in_4bit,
        headless=True,
        images=images,
        shard=shard,
    )
    try:
        head = _scalar_head(name_or_path)
        shape = tuple(head["weight"].shape) if head else None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, whose head cannot be read ({type(error).__name__}: {error}): bring back a "
            "copy of it, or name another model."
        ) from error
    width = model.config.get_text_config().hidden_size
    if shape not in (None, (1, width)):
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, whose head has the shape {shape}: a critic needs one output for {width} "
            "inputs."
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


def load_tokenizer(name_or_path: str, *, flag: str) -> Any:
    """Returns the model's tokenizer.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    return loaded_from(AutoTokenizer, name_or_path, flag)


def load_model_config(name_or_path: str, *, flag: str) -> Any:
    """Returns the configuration of a model.

    Raises:
        CheckpointError: there is no such model; `flag` names it.
    """
    from transformers import AutoConfig

    return loaded_from(AutoConfig, name_or_path, flag)


def load_vocabulary_size(name_or_path: str) -> int:
    """Returns the number of tokens that a model predicts, which may be more than its tokenizer has.

    Raises:
        CheckpointError: there is no such model.
    """
    config = load_model_config(name_or_path, flag="--actor.model_name_or_path")
    return int(config.get_text_config().vocab_size)


def load_reward_tokens(name_or_path: str, *, flag: str) -> tuple[str, str] | None:
    """Returns the tokens for right and wrong in a process reward model's config.json; None of another model.

    Raises:
        CheckpointError: the model cannot be found; `flag` names it.
    """
    tokens = getattr(load_model_config(name_or_path, flag=flag), "reward_tokens", None)
    return None if tokens is None else tuple(tokens)


def load_positions(name_or_path: str) -> int | None:
    """Returns the largest number of tokens of a sequence (`usable_positions`); None if the settings name no number.

    Raises:
        CheckpointError: there is no such model.
    """
    return usable_positions(load_model_config(name_or_path, flag="--actor.model_name_or_path"))


def load_generation_settings(name_or_path: str) -> Any:
    """Returns the checkpoint's `GenerationConfig`, or one made from its model's settings."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(name_or_path)
    except OSError:
        config = load_model_config(name_or_path, flag="--actor.model_name_or_path")
        return GenerationConfig.from_model_config(config)


CONFIG = "config.json"
"""File that each directory of a model has."""


def loaded_from(factory: Any, name_or_path: str, flag: str, **kwargs: Any) -> Any:
    """Returns what the `from_pretrained` of `factory` loads from a directory or the hub.

    Args:
        factory: a class of transformers or peft.
        name_or_path: directory, or name on the hub.
        flag: setting that names it, for errors.
        kwargs: arguments of `from_pretrained`.

    Raises:
        CheckpointError: there is no such model, or it cannot be loaded.
        ConfigurationError: it was loaded, and a check of rollgrad's refused it.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1
    path = Path(name_or_path).expanduser()
    if looks_local and "/" in name_or_path and not path.exists():
        raise CheckpointError(f"{flag} is {name_or_path!r}: there is no such directory.")
    if not path.exists():
        find_model(name_or_path, flag=flag)
    try:
        with LOADING:
            return factory.from_pretrained(str(path) if path.exists() else name_or_path, **kwargs)
    except (MemoryError, torch.OutOfMemoryError, ConfigurationError):
        raise
    except Exception as error:  # a model's code and files may raise anything
        if path.is_dir() and not (path / CONFIG).exists():
            model = path / "model"  # of a run's directory
            hint = f"did you mean {model}?" if (model / CONFIG).exists() else "name the directory of a model."
            raise CheckpointError(f"{flag} is {name_or_path!r}, which has no {CONFIG}; {hint}") from error
        first_line = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(":.")
        if "ignore_mismatched_sizes" in first_line:  # an argument that nobody here has set
            first_line = f"the files have weights of other shapes than its {CONFIG} says"
        raise CheckpointError(
            f"{flag} is {name_or_path!r}, which cannot be loaded as a Hugging Face model: {first_line}. "
            f"{'Bring a whole copy there' if path.exists() else 'Check the name'}, or name another model."
        ) from error
