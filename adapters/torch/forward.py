"""Modules that compute a whole packed batch in one call.

One forward pass takes a micro-batch as a single row of distinct tokens (`layout.py`), attends through a plan
(`attention.py`) and evaluates the vocabulary at action positions only (`head.py`).
Does not own: losses, batching, nor gradients.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rollgrad.adapters.torch.attention import ForestAttention
from rollgrad.adapters.torch.head import token_logprobs
from rollgrad.adapters.torch.layout import build_layout
from rollgrad.domain.batch import PackedBatch


def action_hidden(model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """(hidden_AH of each action token's predecessor, targets_A: the action tokens), where the model is."""
    weight = next(model.parameters())
    layout = build_layout(batch)
    hidden_MH = model.base_model(
        input_ids=layout.tokens_M[None].to(weight.device),
        position_ids=layout.positions_M[None].to(weight.device),
        use_cache=False,
        attention_plan=ForestAttention(layout.nodes, device=weight.device, dtype=weight.dtype),
    ).last_hidden_state[0]
    action_A = batch.action_mask_N.nonzero()[:, 0]
    rows_A = layout.index_N[action_A - 1].to(weight.device)
    return hidden_MH.index_select(0, rows_A), batch.tokens_N[action_A].to(weight.device)


def scatter(values_A: Tensor, batch: PackedBatch) -> Tensor:
    """Values of the action tokens at their places, 0 elsewhere: float32 on the batch's device."""
    full_N = torch.zeros(batch.token_count, dtype=torch.float32, device=batch.tokens_N.device)
    return full_N.index_put((batch.action_mask_N.nonzero()[:, 0],), values_A.to(full_N.device))


class PackedLM(nn.Module):
    """`forward(batch)` gives (logprobs_A, entropy_A) of the action tokens under softmax(logits / temperature), float32.

    `model` is a causal language model with packed attention installed (`loading.py`).
    """

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.scorer = Scorer(model.get_output_embeddings(), temperature)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """See the class."""
        result: tuple[Tensor, Tensor] = self.scorer(*action_hidden(self.model, batch))
        return result


class Scorer(nn.Module):
    """The vocabulary's head without its logits. The head stays a part of the model alone: a module is never a child
    twice."""

    def __init__(self, head: Any, temperature: float) -> None:
        super().__init__()
        self._head = (head,)
        self._temperature = temperature

    @property
    def head(self) -> Any:
        """Whose weights are read."""
        return self._head[0]

    def forward(self, hidden_AH: Tensor, targets_A: Tensor) -> tuple[Tensor, Tensor]:
        """(logprobs_A, entropy_A)."""
        return token_logprobs(hidden_AH, self.head.weight, self.head.bias, targets_A, self._temperature)


class PackedValue(nn.Module):
    """`forward(batch)` gives values_A of the action tokens, float32: a scalar head on the language model's body.

    Without a `head` (`weight` [1, H] and, if there is one, `bias` [1]) values start at 0: an untrained one is no bias.
    """

    def __init__(self, model: Any, head: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model.base_model
        self.value_head = nn.Linear(model.config.hidden_size, 1, device=next(model.parameters()).device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if head:
            self.value_head.load_state_dict({"bias": self.value_head.bias.detach(), **head})

    def forward(self, batch: PackedBatch) -> Tensor:
        """See the class."""
        hidden_AH, _ = action_hidden(self.model, batch)
        values: Tensor = self.value_head(hidden_AH.to(self.value_head.weight.dtype))[:, 0]
        return values.float()
