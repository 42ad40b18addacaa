"""The load-balancing loss of a mixture of experts (Fedus et al. 2021, "Switch Transformers", equations 4 to 6):
experts x sum over experts of (share of tokens sent to it) x (mean probability of sending a token to it).

Means are over the tokens of a whole optimizer step and all layers. A product of two means is not a sum over parts of a
step; but the shares have no gradient, and once they are known the loss is a sum over tokens. So any split of the same
samples gives the same gradient: that of transformers' `load_balancing_loss_func` for the step as one padded batch.

The shares count the experts that were chosen, whatever the rule: some routers add a correction to the probabilities or
choose among groups. The probabilities are those of softmax(router logits).
Does not own: routers, nor how many experts a token is sent to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.attention import ForestAttention, backbone
from rollgrad.adapters.models.torch.layout import Layout, Node
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError


def check_routers(model: Any, coef: float) -> None:
    """Checks by a forward pass of two tokens that `model`, with packed attention installed, has routers whose choices
    can be observed.

    Raises:
        ConfigurationError: it has no such routers.
    """
    recorded = getattr(backbone(model), "_can_record_outputs", None) or {}
    problem = "has no routers to experts that a loss balances"
    if "router_logits" in recorded and hasattr(model.config, "num_experts_per_tok"):
        device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
        with torch.no_grad(), chosen_experts(model) as chosen:
            logits = backbone(model)(
                input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
                position_ids=torch.arange(2, device=device)[None],
                use_cache=False,
                attention_plan=ForestAttention([Node(0, 2)], device=device, dtype=dtype),
                output_router_logits=True,
            ).router_logits
        if chosen and len(chosen) == len(logits):
            return
        problem = "does not show which experts its routers choose"
    raise ConfigurationError(
        f"actor.aux_loss_coef is {coef}, but {type(model).__name__} {problem}: leave --actor.aux_loss_coef out."
    )


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

    experts = [part for name, part in backbone(model).named_modules() if name.rpartition(".")[2] == "experts"]
    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in experts]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def token_counts(layout: Layout, batch: PackedBatch) -> Tensor:
    """Returns counts_M, the number of samples that each distinct token stands for, not counting weightless ones;
    float32."""
    assert batch.loss_weights_N is not None
    weighs_S = torch.zeros(len(batch), dtype=torch.bool)
    weighs_S[batch.sequence_ids_N[batch.loss_weights_N != 0]] = True
    weighs_N = weighs_S[batch.sequence_ids_N].float()
    return torch.zeros(len(layout.tokens_M)).index_add_(0, layout.index_N, weighs_N)


def routed(logits: Sequence[Tensor], chosen: Sequence[Tensor], counts_M: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens_E, the number of tokens sent to each expert, and probabilities_E, the sum of the probabilities of
    sending one there, which has a gradient; both over all layers, float32. For each layer `logits` are [M, E], and the
    chosen experts `chosen` are [M, K]."""
    tokens_E = torch.zeros(logits[0].shape[-1], device=logits[0].device)
    probabilities_E = torch.zeros_like(tokens_E)
    counts_M = counts_M.to(tokens_E.device)
    for layer_ME, experts_MK in zip(logits, chosen, strict=True):
        layer_ME = layer_ME.reshape(len(counts_M), -1)
        counts_MK = counts_M[:, None].expand(experts_MK.shape)
        tokens_E = tokens_E.index_add(0, experts_MK.flatten(), counts_MK.flatten())
        probabilities_E = probabilities_E + counts_M @ layer_ME.float().softmax(-1)
    return tokens_E, probabilities_E


def balance_weights(tokens_E: Tensor, per_token: int) -> Tensor:
    """Returns weights_E of the whole step; the loss is the sum of weights_E x probabilities_E, for a step or a part."""
    rows = tokens_E.sum().clamp(min=1) / per_token
    return len(tokens_E) * (tokens_E / rows) / rows
