"""Merges LoRA adapters into the model that they were trained beside, whoever saved them: rollgrad, peft or OpenRLHF.

Invariants: each merged weight is added up in float32 and rounded once. What is written was read back, and gave the
log-probs that the model with adapters gives; otherwise nothing is written. Nothing is overwritten.
"""

import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.chat.pictures import ImageRenderer, load_processor, sees_images
from rollgrad.adapters.models.torch.layers.classifier import classifier_class
from rollgrad.adapters.models.torch.layers.images import leaves_tower_out, model_factory
from rollgrad.adapters.models.torch.loading.image_check import small_image
from rollgrad.adapters.models.torch.loading.loading import (
    default_device,
    loaded_from,
    processor_files,
    require_weights,
)
from rollgrad.adapters.models.torch.loading.lora import as_named, is_of_4bit
from rollgrad.adapters.models.torch.loading.quantised import four_bits
from rollgrad.adapters.models.torch.loading.saving import PROCESSOR_FILES, save_pretrained, writing
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import CheckpointError, ConfigurationError, MissingExtraError

NAME = "default"
CLASSIFIER = "SEQ_CLS"
"""Peft's task of a reward model."""

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun.",
    "Question: what is 17 + 25? Answer: 17 + 25 = 42.",
    "def square(x):\n    return x * x\n\nprint(square(12))",
    "In 1969 two people walked on the Moon while a third one waited above them.",
    "Sehr geehrte Damen und Herren, vielen Dank für Ihre Nachricht vom Montag.",
    '{"name": "search", "arguments": {"query": "weather", "days": 3}}',
    "To prove the claim, assume the contrary: there is a largest prime number p.",
    "Dear diary, today was long. I met Ann, lost my keys, and found them again.",
)
"""Texts whose log-probs are compared; of a model that sees images one more, with an image."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}
"""Mean difference of log-probs, in nats, that rounding of merged weights can make: several times what it makes."""


@frozen(kw_only=True)
class MergedModel:
    """A merged model."""

    base: str
    """Model that the adapters were trained beside."""
    layers: int
    """Number of layers with adapters."""
    dtype: str
    difference: float
    """Mean difference of log-probs, or of a reward model's scores, from the model with adapters."""
    dequantised: bool
    """Whether its weights are dequantised ones."""
    trained_in_4bit: bool
    """Whether the adapters say that the model beside them was in 4 bits."""
    reward_model: bool
    tokenizer: str
    """Directory or hub name that its tokenizer and template are from."""


def merge_lora(
    adapter: str,
    output: Path,
    *,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    load_in_4bit: bool = False,
    reward_model: bool = False,
) -> MergedModel:
    """Writes the model with the adapters merged to the directory `output`, with tokenizer and chat template.

    Args:
        adapter: directory or hub name of the adapters.
        output: directory that is made.
        model: the model that they were trained beside; None takes the one that they name.
        dtype: number format of the merged weights; None takes the model's own.
        load_in_4bit: the adapters were trained beside weights in 4 bits (QLoRA), so that the dequantised weights of the
            model are merged.
        reward_model: the model is a sequence classifier even if the adapters do not say so.

    Raises:
        CheckpointError: there are no such adapters or model, they do not fit each other, `output` cannot be written, or
            the merged model differs from the model with adapters.
        ConfigurationError: `output` is there already, or the adapters are not LoRA.
        MissingExtraError: a package is not installed.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigurationError(f"{output} is there already, and nothing is overwritten: choose another --output.")
    config = _adapter_config(adapter)
    base = model or config.base_model_name_or_path
    if not base:
        raise ConfigurationError(f"{adapter} does not name the model it was trained beside: name it with --model.")
    place = _tokenizer_place(adapter, base)
    tokenizer = _tokenizer(place)
    reward_model = reward_model or config.task_type == CLASSIFIER
    factory = _factory(base, "--model", adapter, reward_model=reward_model)
    loaded, dequantised = _base_model(factory, base, config, load_in_4bit=load_in_4bit, reward_model=reward_model)
    inputs = _inputs(base, tokenizer, sees=getattr(loaded.config, "vision_config", None) is not None)
    wrapped = _with_adapters(loaded, adapter, config)
    _require_tokens(wrapped, inputs, place, base)
    before = _scores(wrapped, inputs, reward_model=reward_model)
    own = dtype or loaded.dtype
    bound = max(TOLERANCES.get(form, TOLERANCES[torch.float32]) for form in (own, loaded.dtype))
    with foreign_code(lambda words: CheckpointError(f"The adapters of {adapter} cannot be merged: {words}")):
        layers = _merge(wrapped)
    merged = wrapped.unload().to(own)
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with writing(output, flag="--output"), tempfile.TemporaryDirectory(dir=output.absolute().parent) as place_beside:
        written = Path(place_beside) / output.name
        save_pretrained(merged, tokenizer, written, flag="--output")
        del wrapped, loaded, merged
        again = loaded_from(factory, str(written), "--output", dtype="auto")
        after = _scores(again.to(default_device()).eval(), inputs, reward_model=reward_model)
        difference = _mean_difference(before, after)
        if not difference <= bound:  # NaN too
            raise CheckpointError(
                f"The merged model would differ from {base} with the adapters of {adapter}: by {difference:.3g} on "
                f"average over {len(inputs)} texts, where rounding makes {bound:g} at most. Nothing was written: check "
                "that the adapters adapt no weights that the model shares between input and output."
            )
        written.rename(output)
    return MergedModel(
        base=base,
        layers=layers,
        dtype=str(own).removeprefix("torch."),
        difference=difference,
        dequantised=dequantised,
        trained_in_4bit=is_of_4bit(adapter),
        reward_model=reward_model,
        tokenizer=place,
    )


def _require_tokens(model: Any, inputs: Sequence[Mapping[str, Any]], place: str, base: str) -> None:
    """Requires that a model knows all tokens of its inputs, which the tokenizer of `place` has made.

    Raises:
        CheckpointError: it knows fewer.
    """
    known = len(model.get_input_embeddings().weight)
    if (largest := max(int(arguments["input_ids"].max()) for arguments in inputs)) >= known:
        raise CheckpointError(
            f"The tokenizer of {place} makes the token {largest} of a text, but {base} has {known} tokens: name with "
            "--model the model that the adapters were trained beside."
        )


def _adapter_config(adapter: str) -> Any:
    """Returns peft's settings of the adapters.

    Raises:
        CheckpointError: there are none.
        ConfigurationError: they are of another kind.
        MissingExtraError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("Merging adapters needs peft: pip install rollgrad[lora].") from error
    path = Path(adapter)
    if path.exists() and not (path / "adapter_config.json").is_file():
        of_run = [path / place for place in ("adapter", "model/adapter")]
        found = [place for place in of_run if (place / "adapter_config.json").is_file()]
        hint = found[0] if found else "the directory of adapters, such as RUN/model/adapter"
        raise CheckpointError(f"--adapter is {adapter!r}, which holds no adapter_config.json: name {hint}.")
    config = loaded_from(peft.PeftConfig, adapter, "--adapter")
    if config.peft_type != peft.PeftType.LORA:
        raise ConfigurationError(f"--adapter is {adapter!r}, of the kind {config.peft_type}: only LoRA can be merged.")
    return config


def _tokenizer_place(adapter: str, base: str) -> str:
    """Returns where the tokenizer that the adapters were trained with is: beside them, in the model that rollgrad saved
    one directory above, or with the base."""
    path = Path(adapter)
    for place in (path, path.resolve().parent):
        if (place / "tokenizer_config.json").is_file():
            return str(place)
    return base


def _tokenizer(place: str) -> Any:
    from transformers import AutoTokenizer

    return loaded_from(AutoTokenizer, place, "--model")


def _factory(name_or_path: str, flag: str, adapter: str, *, reward_model: bool) -> Any:
    """Returns the class that loads a model, or a reward model. One that may see images or not (Qwen3.5) does if the
    layers of `adapter` are called as those of a model that sees them."""
    import peft
    from transformers import AutoConfig

    config = loaded_from(AutoConfig, name_or_path, flag)
    if reward_model:
        return classifier_class(config)
    if not leaves_tower_out(config):
        return model_factory(config)
    with foreign_code(lambda words: CheckpointError(f"The adapters of {adapter} cannot be read: {words}")):
        names = peft.load_peft_weights(adapter, device="cpu")
    return model_factory(config, images=any(".language_model." in name for name in names))


def _base_model(factory: Any, base: str, config: Any, *, load_in_4bit: bool, reward_model: bool) -> tuple[Any, bool]:
    """Returns the model beside the adapters, and whether it was in 4 bits.

    Raises:
        CheckpointError: there is none, or its files lack weights that the adapters do not bring.
    """
    device = default_device()
    options: dict[str, Any] = {"num_labels": 1} if reward_model else {}
    if load_in_4bit:
        from transformers import AutoConfig

        own = loaded_from(AutoConfig, base, "--model").dtype or torch.float32
        options |= four_bits(own, device)
    model, info = loaded_from(factory, base, "--model", dtype="auto", output_loading_info=True, **options)
    setattr(model, PROCESSOR_FILES, processor_files(base) if sees_images(base) else {})
    brought = tuple(config.modules_to_save or ())
    missing = [name for name in info["missing_keys"] if not any(part in name.split(".") for part in brought)]
    require_weights(model, missing, base, "--model", headless=False)
    dequantised = getattr(model, "hf_quantizer", None) is not None
    if dequantised:
        with foreign_code(lambda words: CheckpointError(f"--model is {base!r}, which cannot be dequantised: {words}")):
            model.dequantize()
    return model.to(device).eval(), dequantised


def _with_adapters(model: Any, adapter: str, config: Any) -> Any:
    """Returns the model with its adapters, all of which were in the files, and no others.

    Raises:
        CheckpointError: the adapters do not fit.
    """
    import peft

    def unfit(words: str) -> CheckpointError:
        return CheckpointError(
            f"The adapters of {adapter} do not fit {model.name_or_path}: {words} Name with --model the model that they "
            "were trained beside."
        )

    kinds = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING
    config.inference_mode = True
    with foreign_code(unfit), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {name for name, _ in model.named_modules()}
        whole = isinstance(config.target_modules, list | set) and set(config.target_modules) <= names
        with as_named() if whole else nullcontext():  # as rollgrad writes them
            wrapped = kinds.get(config.task_type, peft.PeftModel)(model, config, NAME)
        result = wrapped.load_adapter(adapter, NAME, torch_device=str(default_device()))
    wrong = [*result.missing_keys, *result.unexpected_keys]
    if wrong:
        more = f" and {len(wrong) - 3} others" if len(wrong) > 3 else ""
        raise unfit(f"the files and the model's layers do not agree about {', '.join(wrong[:3])}{more}.")
    return wrapped.eval()


def _merge(wrapped: Any) -> int:
    """Merges every adapter into its weight, which keeps its number format; returns their number."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers = [layer for layer in wrapped.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        # Peft adapts the experts of a mixture as parameters, not as layers.
        weight = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
        dtype = weight.dtype
        weight.data = weight.data.float()
        layer.merge(safe_merge=True)
        weight.data = weight.data.to(dtype)
    return len(layers)


def _inputs(base: str, tokenizer: Any, *, sees: bool) -> list[dict[str, Tensor]]:
    """Returns a model's arguments for each text that is compared; the last is of an image too, if it `sees` any."""
    found = [{**tokenizer(text, return_tensors="pt", add_special_tokens=False)} for text in TEXTS]
    inputs = [{"input_ids": encoded["input_ids"]} for encoded in found]
    if sees and sees_images(base):
        renderer = ImageRenderer(load_processor(base, tokenizer, flag="--model"))
        inputs.append(renderer.inputs(f"{renderer.mark} {TEXTS[0]}", small_image()))
    return inputs


@torch.no_grad()
def _scores(model: Any, inputs: Iterable[Mapping[str, Tensor]], *, reward_model: bool) -> list[Tensor]:
    """Returns for each text the log-probs of its tokens, or a reward model's score."""
    found = []
    for arguments in inputs:
        on_device = {name: value.to(model.device) for name, value in arguments.items()}
        tokens = on_device["input_ids"]
        logits = model(**on_device).logits.float()
        if reward_model:
            found.append(logits.flatten().cpu())
        else:
            logprobs = torch.log_softmax(logits[0, :-1], dim=-1)
            found.append(logprobs.gather(1, tokens[0, 1:, None]).flatten().cpu())
    return found


def _mean_difference(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    return float((torch.cat(list(before)) - torch.cat(list(after))).abs().mean())
