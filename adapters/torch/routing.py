"""The load-balancing loss of a mixture of experts (Fedus et al. 2021, "Switch Transformers", equations 4 to 6):
experts x sum over experts of (share of tokens sent to it) x (mean probability of sending a token to it).

Tokens are those of a whole optimizer step, over all layers: the product of two means is not the sum over parts of a
step, but once the shares are known, which have no gradient, it is a sum over tokens. So any split of the same samples
gives the same gradient: that of transformers' `load_balancing_loss_func` for the step's samples as one padded batch.
Does not own: routers, nor how many experts a token is sent to.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.torch.layout import Layout
from rollgrad.domain.batch import PackedBatch
from rollgrad.domain.errors import ConfigurationError


def check_routers(model: Any, coef: float) -> None:
    """Whether `model` has routers.

    Raises:
        ConfigurationError: it has none whose choices a loss could balance.
    """
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    if "router_logits" not in recorded or not hasattr(model.config, "num_experts_per_tok"):
        raise ConfigurationError(
            f"actor.aux_loss_coef is {coef}, but {type(model).__name__} has no routers to experts that a loss "
            "balances: leave --actor.aux_loss_coef out."
        )


def token_counts(layout: Layout, batch: PackedBatch) -> Tensor:
    """counts_M: how many samples each distinct token stands for, without those that weigh nothing; float32."""
    assert batch.loss_weights_N is not None
    weighs_S = torch.zeros(len(batch), dtype=torch.bool)
    weighs_S[batch.sequence_ids_N[batch.loss_weights_N != 0]] = True
    weighs_N = weighs_S[batch.sequence_ids_N].float()
    return torch.zeros(len(layout.tokens_M)).index_add_(0, layout.index_N, weighs_N)


def routed(logits: Sequence[Tensor], counts_M: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """(tokens_E, probabilities_E) over all layers, float32: tokens sent to each expert, and the sum of the
    probabilities of sending one there, which has a gradient. `logits` are [M, E] of each layer."""
    tokens_E = torch.zeros(logits[0].shape[-1], device=logits[0].device)
    probabilities_E = torch.zeros_like(tokens_E)
    counts_M = counts_M.to(tokens_E.device)
    for layer_ME in logits:
        probabilities_ME = layer_ME.float().softmax(-1)
        experts_MK = probabilities_ME.detach().topk(per_token, dim=-1).indices
        tokens_E = tokens_E.index_add(0, experts_MK.flatten(), counts_M.repeat_interleave(per_token))
        probabilities_E = probabilities_E + counts_M @ probabilities_ME
    return tokens_E, probabilities_E


def balance_weights(tokens_E: Tensor, per_token: int) -> Tensor:
    """The loss is the sum of these times `probabilities_E`, both of the whole step, or of its parts."""
    rows = tokens_E.sum().clamp(min=1) / per_token
    return len(tokens_E) * (tokens_E / rows) / rows
