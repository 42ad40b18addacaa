"""Gradient checkpointing of a model's layers: which activations are kept for the backward pass, and which it computes
again.

`full` keeps the input of each layer (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). `selective`
also keeps what takes long to compute for its bytes (Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", section 5, choose by the same measure, but say what is computed again). It keeps results of
attention, of which one number takes as many operations as there are tokens before it, and of products of matrices, of
which one takes two operations for each row of the right factor. Norms, rotary embeddings, activations and products of a
narrow factor, such as those of adapters, are computed again.
Invariant: gradients are the same bit for bit where kernels are deterministic.
Does not own: where inputs of layers are kept (`offloading.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.experts.router_replay import router_replay
from rollgrad.adapters.models.torch.layers.layer_plans import plans_again
from rollgrad.adapters.models.torch.offloading import OffloadedInputs, Transfers, transfers_of
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.errors import ConfigurationError

aten = torch.ops.aten

PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten._grouped_mm.default: 0}
"""Products of linear layers and experts, and which of their arguments is the left factor. Those of batches of matrices
are left out: they are parts of attention and of recurrences, whose code computes with their results in place."""

ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "torch_attn::_varlen_attn",
    }
)
"""Names of the operations that compute attention (`kernels/attention.py`)."""

NARROW = 0.5
"""Share of the model's width from which on the inner dimension of a product is wide."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts in which a layer is computed, and computed again."""


def recompute_layers(model: nn.Module) -> None:
    """Puts those modules alone in train mode that recompute activations, as transformers asks of them. Their parts stay
    in eval mode, for ratios need a deterministic policy: in train mode some drop numbers, or route to experts at random
    (Phi-3.5-MoE, Mixtral with `router_jitter_noise`)."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in [*vars(module).items()]:
                if "drop" in name and isinstance(value, float):  # of functional dropout, and of layers left out
                    setattr(module, name, 0.0)


class Recomputation:
    """Gradient checkpointing of `model`, from now on, in the blocks of `during`.

    Args:
        model: a causal language model, with its adapters.
        dropout: dropout of its adapters, which leaves out the same numbers when it is computed again.
        kind: what is kept.
        offloads: whether the inputs of layers are kept in the machine's memory.
        transfers: copies them there.
        attention: names of the operations that compute attention.

    Raises:
        ConfigurationError: transformers cannot recompute the activations of such a model.
    """

    def __init__(
        self,
        model: Any,
        dropout: AdapterDropout,
        kind: Checkpointing,
        *,
        offloads: bool = False,
        transfers: Callable[[torch.device], Transfers] = transfers_of,
        attention: Set[str] = ATTENTION,
    ) -> None:
        self._on = kind is not Checkpointing.OFF
        self._offloaded = OffloadedInputs(transfers) if offloads else None
        if not self._on:
            return
        self._policy = _policy(model, attention) if kind is Checkpointing.SELECTIVE else None
        self._dropout, self._replay = dropout, router_replay(model)
        if not model.supports_gradient_checkpointing:
            raise ConfigurationError(
                f"actor.gradient_checkpointing is {kind}, which transformers does not support in "
                f"{type(model).__name__}: set --actor.gradient_checkpointing off."
            )
        # Before transformers 5.24 it is named gradient_checkpointing_enable alone.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": self._contexts})
        if self._offloaded is not None:
            for module in [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]:
                module._gradient_checkpointing_func = self._offloaded.around(module._gradient_checkpointing_func)

    @contextmanager
    def during(self, module: nn.Module) -> Iterator[None]:
        """Recomputes activations inside the block, which trains `module`; after it the model is in eval mode."""
        if self._on:
            recompute_layers(module)
        try:
            yield
        finally:
            module.eval()
            if self._offloaded is not None:
                self._offloaded.clear()

    def _contexts(self) -> Contexts:
        """Returns the contexts of a layer: what is computed again follows the same plan, leaves out the same, and
        goes to the same experts, for another pass may have begun."""
        first: AbstractContextManager[Any] = nullcontext()
        again: list[AbstractContextManager[Any]] = []
        if self._policy is not None:
            first, kept = create_selective_checkpoint_contexts(self._policy)  # type: ignore[no-untyped-call]
            again.append(kept)
        again += [plans_again(), self._dropout.again()]
        if self._replay is not None:
            again.append(self._replay.again())
        return first, _together(again)


@contextmanager
def _together(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _policy(model: Any, attention: Set[str]) -> "_Policy":
    """Returns what is kept of a model's layers."""
    width = getattr(model.config.get_text_config(), "hidden_size", 0)  # BLT's layers have several
    products = dict(PRODUCTS)
    if any(getattr(part, "has_bias", False) for part in model.modules()):
        del products[aten._grouped_mm.default]  # transformers adds the biases of experts (gpt-oss) to it in place
    return _Policy(width * NARROW, products, attention)


class _Policy:
    """Decides whether the result of an operation is kept; products are whose inner dimension is at least `wide`."""

    def __init__(self, wide: float, products: Mapping[Any, int], attention: Set[str]) -> None:
        self._wide, self._products, self._attention = wide, products, attention

    def __call__(self, context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        """Implements the policy of torch's selective checkpointing."""
        keeps = operation.name() in self._attention
        if operation in self._products:
            keeps = arguments[self._products[operation]].shape[-1] >= self._wide
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
