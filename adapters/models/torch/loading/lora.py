"""LoRA: a model whose weights stay, and a trained product of two narrow matrices beside each linear layer: W + alpha /
rank * B A (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1). With `rslora` it is W +
alpha / sqrt(rank) * B A (Kalajdzievski 2023, "rsLoRA", arXiv:2312.03732, eq. 2). With `dora` each row of that sum has a
trained length m in the place of its own (Liu et al. 2024, "DoRA", arXiv:2402.09353, eq. 5), through which no gradient
goes (section 4.3).

Invariants: the model keeps its class and its parts; B starts at 0, and m at the lengths of W's rows, so that fresh
adapters change nothing; A starts by the seed, equal in every process. Exported weights are those of the plain model:
adapters are added to the weights in float32, and the sum is rounded once to the compute format. A forward pass through
the adapters does not round that sum: in bfloat16 an engine with a copy of the weights differs by this rounding, one
that shares the model does not.
Does not own: the optimizer, nor putting weights together that are divided over processes (`models.py`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from rollgrad.adapters.models.torch.loading.quantised import dequantised, is_quantised, is_turned
from rollgrad.adapters.models.torch.loading.saving import writing
from rollgrad.application.settings.sections.actor import ALL_LINEAR, AdapterConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError, MissingExtraError

NO_PEFT = "{at}.rank is {rank}, but LoRA needs peft: pip install rollgrad[lora], or leave --{at}.rank out."
"""The error where it is not installed, for the section `at` of settings."""

ADAPTER_FILE = "adapter_model.safetensors"
"""File of adapters' weights, as peft names it."""

BASE, IN_4BIT = "base", "4bit"
"""Entry of that file's metadata, where the adapters were trained beside weights in 4 bits."""

ADAPTER = "default"
"""Peft's name for the only adapter of a model."""

UNADAPTED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), (".out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), (".out_proj", ".dt_proj")),
    "jamba": (".dt_proj",),
    "longcat_flash": (".router.classifier",),
}
"""Ends of the names of layers whose weight a type's code, or the kernel of its scan, reads without calling the layer,
which leaves an adapter out; of the first two rows peft adapts no out_proj (`_check_lora_target_modules_mamba`)."""
OTHERWISE = frozenset({"Llama4Router", "PhimoeTopKRouter", "DeepseekV4GroupedLinear"})
"""Classes of transformers that are linear layers, but return something else than the product of input and weight."""
OF_ENCODER = ".encoder_attn."
"""Part of the names of a decoder's attention to an encoder, which a causal language model has not."""

SAVED_PREFIX = "base_model.model."
"""Prefix of weights' names in peft's files, which are written from a model in two wrappers."""


@frozen(kw_only=True, eq=False)
class NamedWeight:
    """A `parameter` with its name in Hugging Face files; `layer` is peft's layer, if it has an adapter."""

    name: str
    parameter: nn.Parameter
    layer: Any = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that `value` reads."""
        return [self.parameter, *(_added(self.layer) if self.layer is not None else ())]

    def value(self, whole: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Returns the weight, with its adapter, and dequantised if it is in 4 bits; otherwise the parameter's own
        memory. `whole` returns a parameter whole."""
        weight = dequantised(whole(self.parameter))
        if self.layer is not None:
            a, b = (whole(matrix).detach().float() for matrix in _matrices(self.layer))
            product = self.layer.scaling[ADAPTER] * (b @ a)
            turned = self.layer.fan_in_fan_out
            merged: Tensor = weight.float() + (product.T if turned else product)
            for lengths in _lengths(self.layer):
                of_rows = whole(lengths).detach().float() / merged.norm(dim=0 if turned else 1)
                merged = merged * (of_rows if turned else of_rows[:, None])
            weight = merged.to(weight.dtype)
        return weight.T.contiguous() if is_turned(self.parameter) else weight


def add_lora(model: Any, lora: AdapterConfig, *, seed: int, at: str = "actor.lora") -> None:
    """Puts adapters into `model`, in place and in its number format; nothing else of it is trainable afterwards.

    Args:
        model: a transformers model; for packed training, after its attention was installed.
        lora: what adapters there are; `rank` is above 0.
        seed: seed of the initial A.
        at: the section of settings that `lora` is.

    Raises:
        ConfigurationError: a target module is no linear layer of the model, or its head.
        MissingExtraError: peft is not installed.
    """
    targets = _targets(model, lora.target_modules, at)
    # peft imports bitsandbytes if it is installed, which warns that it lacks an optional kernel for CPUs
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError(NO_PEFT.format(at=at, rank=lora.rank)) from error
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        lora_dropout=lora.dropout,  # `AdapterDropout` computes it
        target_modules=targets,
        bias="none",
    )
    settings.base_model_name_or_path = model.name_or_path
    with torch.random.fork_rng(devices=[]), as_named():
        torch.default_generator.manual_seed(seed)  # peft draws on the CPU, wherever the model is
        peft.inject_adapter_in_model(settings, model, ADAPTER)
    for layer in _layers(model):
        if is_quantised(layer.base_layer.weight):  # peft makes float32 adapters then
            for matrix in _matrices(layer):
                matrix.data = matrix.data.to(layer.base_layer.compute_dtype)
    model.eval()


@contextmanager
def as_named() -> Iterator[None]:
    """Lets peft adapt the layers that are named inside the block. It takes names that layers and single experts have in
    common, such as gate_proj of a shared expert, for those of experts in older files, and would adapt all experts."""
    from peft.utils import transformers_weight_conversion as conversion

    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda config, **given: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def adapter_numbers(model: Any, lora: AdapterConfig, *, at: str = "actor.lora") -> int:
    """Returns the number of parameters of the adapters of `lora`, the section `at` of settings, in `model`, which may
    be on the meta device.

    Raises:
        ConfigurationError: as `add_lora`.
    """
    layers = [model.get_submodule(name) for name in _targets(model, lora.target_modules, at)]
    lengths = sum(getattr(layer, "out_features", None) or layer.nf for layer in layers) if lora.dora else 0
    return lengths + lora.rank * sum(sum(layer.weight.shape) for layer in layers)


def plain_weights(module: nn.Module) -> list[NamedWeight]:
    """Returns every weight of the model without adapters, under its own name."""
    layers = _layers(module)
    adapted = {layer.base_layer.weight: layer for layer in layers}
    added = {parameter for layer in layers for parameter in _added(layer)}
    return [
        NamedWeight(name=_plain(name), parameter=parameter, layer=adapted.get(parameter))
        for name, parameter in module.named_parameters()
        if parameter not in added
    ]


def plain_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers in a checkpoint of the model without adapters."""
    state = module.state_dict(keep_vars=True)
    scales = tuple(f"{name}." for name, parameter in module.named_parameters() if is_quantised(parameter))
    return {
        _plain(name): tensor
        for name, tensor in state.items()
        if not isinstance(tensor, nn.Parameter) and not name.startswith(scales)
    }


def adapter_weights(module: nn.Module) -> list[NamedWeight]:
    """Returns the adapters' own weights, as peft names them in files; none without LoRA."""
    added = {parameter for layer in _layers(module) for parameter in _added(layer)}
    return [
        NamedWeight(name=SAVED_PREFIX + _saved(name), parameter=parameter)
        for name, parameter in module.named_parameters()
        if parameter in added
    ]


def save_adapter(model: Any, weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes `adapter_weights` and their settings as peft does, to the directory `path`, which it makes. Metadata of
    the file, which peft does not read, say whether the model is in 4 bits.

    Raises:
        CheckpointError: `path` cannot be written.
    """
    from safetensors.torch import save_file

    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        model.peft_config[ADAPTER].save_pretrained(str(path))
        base = {BASE: IN_4BIT} if any(map(is_quantised, model.parameters())) else {}
        save_file(dict(weights), path / ADAPTER_FILE, metadata={"format": "pt", **base})


def is_of_4bit(adapter: str) -> bool:
    """Returns whether the file of adapters in a directory says that they were trained beside weights in 4 bits, as
    `save_adapter` has it say."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(adapter, ADAPTER_FILE), framework="pt") as tensors:
            return (tensors.metadata() or {}).get(BASE) == IN_4BIT
    except (OSError, SafetensorError):  # of the hub, or in another format
        return False


def load_adapter(model: Any, path: Path) -> None:
    """Fills a model's adapters with those that `save_adapter` has written to the directory `path`.

    Raises:
        CheckpointError: they cannot be read, or are others.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = load_file(path / ADAPTER_FILE)
        with torch.no_grad():
            for weight in adapter_weights(model):
                weight.parameter.copy_(saved[weight.name])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"The adapters in {path} cannot be loaded ({type(error).__name__}: {error}): bring back a copy of them."
        ) from error


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Switches the adapters off inside the block, for every thread."""
    layers = _layers(module)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(module: nn.Module) -> list[Any]:
    """Returns peft's layers."""
    if not hasattr(module, "peft_config"):
        return []  # without an import of peft, which takes seconds
    from peft.tuners.lora import LoraLayer

    return [layer for layer in module.modules() if isinstance(layer, LoraLayer)]


def _matrices(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns A [rank, in] and B [out, rank]."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _lengths(layer: Any) -> list[nn.Parameter]:
    """Returns m [out], if the layer has one."""
    found = layer.lora_magnitude_vector
    return [found[ADAPTER].weight] if ADAPTER in found else []


def _added(layer: Any) -> list[nn.Parameter]:
    """Returns all parameters of a layer's adapter."""
    return [*_matrices(layer), *_lengths(layer)]


def _saved(name: str) -> str:
    """Returns the name of an adapter's parameter in peft's files."""
    lengths = f".lora_magnitude_vector.{ADAPTER}.weight"
    return name.replace(lengths, ".lora_magnitude_vector").replace(f".{ADAPTER}.", ".")


def _plain(name: str) -> str:
    """Returns a weight's name without peft's `base_layer`, where peft keeps the original layer."""
    return name.replace(".base_layer.", ".")


def _targets(model: Any, wanted: tuple[str, ...], at: str = "actor.lora") -> list[str]:
    """Returns the full names of the linear layers whose names end as `wanted` says."""
    linear = _adaptable(model)
    if wanted == ALL_LINEAR:
        return linear
    for target in wanted:
        if not any(_ends(name, target) for name in linear):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigurationError(
                f"{at}.target_modules has {target!r}, but the linear layers of {type(model).__name__} that can have "
                f"adapters are {there}: change --{at}.target_modules."
            )
    return [name for name in linear if any(_ends(name, target) for target in wanted)]


def _adaptable(model: Any) -> list[str]:
    """Returns the full names of the linear layers that can have adapters. The head cannot, whose weight is read without
    its layer, nor can layers that share a weight (Zamba's), as one weight cannot take in the adapters of each."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    sees = getattr(model.config, "vision_config", None) is not None
    of_text = set((model.get_decoder() if sees else model).modules())  # what images go through gets no adapters
    unadapted = UNADAPTED.get(model.config.model_type, ())
    linear = {name: part for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))}
    layers_of_weight = Counter(id(part.weight) for part in linear.values())
    return [
        name
        for name, part in linear.items()
        if part in of_text
        and part is not head
        and layers_of_weight[id(part.weight)] == 1
        and type(part).__name__ not in OTHERWISE
        and OF_ENCODER not in name
        and not name.endswith(unadapted)
    ]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
