"""Additions to loaders of some models of vLLM 0.32, with which they load what a trainer sends.

The trainer sends the experts of a layer as it has them: one tensor of all. Most models of vLLM take it as it is; the
loaders of some know names in files alone, and get its parts, which are views.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

ONE_BY_ONE = frozenset(
    {
        "AXK1ForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "HYV3ForCausalLM",
        "KimiLinearForCausalLM",
        "LongcatFlashForCausalLM",
        "MiMoV2FlashForCausalLM",
        "NemotronHForCausalLM",
    }
)
"""Classes of vLLM's models whose loaders look an expert's tensors up by its number."""

PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    **{name: (name,) for name in ("up_proj", "down_proj", "w2")},
    "w13": ("w1", "w3"),
}
"""Parts of joined experts, by their names: matrices of one expert, one above the other."""
JOINED = re.compile(rf"(?P<experts>.*\.experts)\.(?P<joined>{'|'.join(PARTS)})")
"""Names of joined experts."""


def complete_loaders(model: Any) -> None:
    """Lets vLLM's `model` load joined experts, and load its weights again."""
    for tensor in model.parameters():
        loader = getattr(tensor, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            # By which vLLM's reloading knows loaders; that of MiniMax-M2's norms has none.
            loader.__dict__["__name__"] = loader.func.__name__
    head: Any = getattr(model, "lm_head", None)
    if getattr(head, "bias", None) is not None:
        # Models that vLLM takes from transformers (Phi) get a new bias each time that they load one.
        head._register_bias = _keep_bias
    for module in model.modules():
        if getattr(module, "is_fused_checkpoint_transposed", False):
            # In files of Qwen3-VL experts lie the other way round than in transformers, and so than they are sent.
            module.is_fused_checkpoint_transposed = False
    if any(type(module).__name__ in ONE_BY_ONE for module in model.modules()):
        model.load_weights = partial(_load_apart, model.load_weights)


def _keep_bias() -> None:
    """Does nothing: the head has its bias."""


def _load_apart(load: Callable[[Iterator[tuple[str, Tensor]]], Any], weights: Iterable[tuple[str, Tensor]]) -> Any:
    return load(_apart(weights))


def _apart(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors, joined experts (experts, rows, columns) as one of each expert and projection."""
    for name, tensor in weights:
        found = JOINED.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        parts = PARTS[found["joined"]]
        for number, expert in enumerate(tensor):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{found['experts']}.{number}.{part}.weight", rows
