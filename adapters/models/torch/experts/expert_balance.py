"""Two losses of a mixture's routers. The load-balancing loss is experts x sum over experts of (share of tokens sent to
it) x (mean probability of sending a token to it) (Fedus et al. 2021, "Switch Transformers", equations 4 to 6). The
z-loss is the mean of logsumexp(router logits)^2, which keeps logits small (Zoph et al. 2022, "ST-MoE",
arXiv:2202.08906, equation 5).

Means are over the tokens of a whole optimizer step and all layers. A product of two means is not a sum over parts of a
step; but the shares have no gradient, and once they are known both losses are sums over tokens. So any split of the
same samples gives the same gradient: that of transformers' `load_balancing_loss_func` and `router_z_loss_func` for the
step as one padded batch.

The shares count the experts that were chosen, whatever the rule: some routers add a correction to the probabilities or
choose among groups. The probabilities are those of softmax(router logits).
Does not own: routers, nor how many experts a token is sent to.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.attention import ForestAttention, backbone
from rollgrad.adapters.models.torch.layers.layout import Layout, Node
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError


def check_routers(model: Any, coefs: Mapping[str, float]) -> None:
    """Checks by a forward pass of two tokens that `model`, with packed attention installed, has routers whose choices
    can be observed; `coefs` are the weights of the losses that need them, by name.

    Raises:
        ConfigurationError: it has no such routers.
    """
    recorded = getattr(backbone(model), "_can_record_outputs", None) or {}
    problem = "has no routers to experts that a loss balances"
    if "router_logits" not in recorded and _experts(model):
        import transformers

        problem = f"does not show its routers to experts in transformers {transformers.__version__}"
    elif "router_logits" in recorded and hasattr(model.config, "num_experts_per_tok"):
        with torch.no_grad(), chosen_experts(model) as chosen:
            logits = two_token_pass(model, output_router_logits=True).router_logits
        if chosen and len(chosen) == len(logits):
            return
        problem = "does not show which experts its routers choose"
    given = " and ".join(f"actor.{name}_coef is {coef}" for name, coef in coefs.items())
    flags = " and ".join(f"--actor.{name}_coef" for name in coefs)
    raise ConfigurationError(f"{given}, but {type(model).__name__} {problem}: leave {flags} out.")


def two_token_pass(model: Any, **settings: Any) -> Any:
    """Returns the output of the body of `model`, with packed attention installed, for two tokens."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    if not is_padded(model):
        settings["attention_plan"] = ForestAttention([Node(0, 2)], device=device, dtype=dtype)
    return backbone(model)(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False, **settings)


@contextmanager
def chosen_experts(model: Any) -> Iterator[list[Tensor]]:
    """Yields a list to which a forward pass inside adds, for each layer with experts, the indices of the chosen ones,
    [M, K], which transformers passes to the experts beside the hidden states."""
    chosen: list[Tensor] = []

    def note(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        for argument in (*positional, *named.values()):
            if isinstance(argument, Tensor) and argument.dtype == torch.int64:
                chosen.append(argument.detach().reshape(-1, argument.shape[-1]))
                return

    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in _experts(model)]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def _experts(model: Any) -> list[torch.nn.Module]:
    """Returns the experts of each layer that has any."""
    return [part for name, part in backbone(model).named_modules() if name.rpartition(".")[2] == "experts"]


def token_counts(layout: Layout, batch: PackedBatch) -> Tensor:
    """Returns counts_M, the number of samples that each distinct token stands for, not counting weightless ones;
    float32."""
    assert batch.loss_weights_N is not None
    weighs_S = torch.zeros(len(batch), dtype=torch.bool)
    weighs_S[batch.sequence_ids_N[batch.loss_weights_N != 0]] = True
    weighs_N = weighs_S[batch.sequence_ids_N].float()
    return torch.zeros(len(layout.tokens_M)).index_add_(0, layout.index_N, weighs_N)


def routed(logits: Sequence[Tensor], chosen: Sequence[Tensor], counts_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens_E, the number of tokens sent to each expert, and with gradients probabilities_E, the sum of the
    probabilities of sending one there, and the sum of logsumexp(logits)^2, a scalar; all over all layers, float32. For
    each layer `logits` are [M, E], and the chosen experts `chosen` are [M, K]."""
    tokens_E = torch.zeros(logits[0].shape[-1], device=logits[0].device)
    probabilities_E = torch.zeros_like(tokens_E)
    squares = tokens_E.new_zeros(())
    counts_M = to_device(counts_M, tokens_E.device)
    for layer_ME, experts_MK in zip(logits, chosen, strict=True):
        layer_ME = layer_ME.reshape(len(counts_M), -1).float()
        counts_MK = counts_M[:, None].expand(experts_MK.shape)
        tokens_E = tokens_E.index_add(0, experts_MK.flatten(), counts_MK.flatten())
        probabilities_E = probabilities_E + counts_M @ layer_ME.softmax(-1)
        squares = squares + counts_M @ layer_ME.logsumexp(-1).square()
    return tokens_E, probabilities_E, squares


@frozen(eq=False)
class StepRouting:
    """The routing of a whole optimizer step: `tokens_E`, the number of tokens sent to each expert over all layers and
    processes, and the number of experts `per_token`."""

    tokens_E: Tensor
    per_token: int

    def losses(self, probabilities_E: Tensor, squares: Tensor) -> dict[str, Tensor]:
        """Returns the share that a part of the step has in each loss, by name, from what `routed` says of the part."""
        tokens = self.tokens_E.sum().clamp(min=1) / self.per_token  # each counts once a layer
        weights_E = len(self.tokens_E) * (self.tokens_E / tokens) / tokens
        return {"aux_loss": (weights_E * probabilities_E).sum(), "router_z_loss": squares / tokens}
