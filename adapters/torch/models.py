"""In-process policy, critic and reference over packed batches, on one device.

One forward pass takes a micro-batch as a single row of distinct tokens (`layout.py`), attends through a plan
(`attention.py`) and evaluates the vocabulary at action positions only (`head.py`).
Does not own: losses (the objective is handed in), batching, nor what the weights are pushed to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollgrad.adapters.torch.attention import ForestAttention
from rollgrad.adapters.torch.head import token_logprobs
from rollgrad.adapters.torch.layout import build_layout
from rollgrad.adapters.torch.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.domain.batch import PackedBatch
from rollgrad.domain.errors import CheckpointError, NonFiniteUpdateError
from rollgrad.domain.ports.models import (
    LossOutput,
    PolicyModel,
    PolicyObjective,
    ReferenceModel,
    TokenScores,
    ValueModel,
    ValueObjective,
)


class _PackedForward:
    """Hidden states from which each action token of a batch is predicted."""

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype

    def action_hidden(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(hidden_AH of each action token's predecessor, action_A: index in N of each action token)."""
        layout = build_layout(batch)
        plan = ForestAttention(layout.nodes, device=self.device, dtype=self.dtype)
        hidden_MH = self.model.base_model(
            input_ids=layout.tokens_M[None].to(self.device),
            position_ids=layout.positions_M[None].to(self.device),
            use_cache=False,
            attention_plan=plan,
        ).last_hidden_state[0]
        action_A = batch.action_mask_N.nonzero()[:, 0]
        return hidden_MH.index_select(0, layout.index_N[action_A - 1].to(self.device)), action_A

    def scores(self, batch: PackedBatch) -> TokenScores:
        """Log-probs and entropy of the action tokens, on the CPU side of the batch's device."""
        hidden_AH, action_A = self.action_hidden(batch)
        head = self.model.get_output_embeddings()
        targets_A = batch.tokens_N[action_A].to(self.device)
        logprobs_A, entropy_A = token_logprobs(hidden_AH, head.weight, head.bias, targets_A, self.temperature)
        return TokenScores(
            logprobs_N=_scatter(logprobs_A, action_A, batch), entropy_N=_scatter(entropy_A, action_A, batch)
        )


def _scatter(values_A: Tensor, action_A: Tensor, batch: PackedBatch) -> Tensor:
    full_N = torch.zeros(batch.token_count, dtype=torch.float32, device=batch.tokens_N.device)
    return full_N.index_put((action_A,), values_A.to(full_N.device))


def _optimizer_step(
    micro_batches: Sequence[PackedBatch],
    loss_of: Callable[[PackedBatch], LossOutput],
    optimizer: MasterOptimizer,
) -> dict[str, float]:
    """Accumulates the micro-batches' gradients and steps once."""
    totals: dict[str, float] = {"loss": 0.0}
    for batch in micro_batches:
        output = loss_of(batch)
        loss = float(output.loss.detach())
        if not torch.isfinite(output.loss):
            optimizer.clear()
            raise NonFiniteUpdateError(f"The loss is {loss}; the optimizer step was not applied.")
        output.loss.backward()  # type: ignore[no-untyped-call]
        totals["loss"] += loss
        for name, value in output.metrics.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals | optimizer.step()


def _save_pretrained(model: Any, tokenizer: Any, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    except OSError as error:
        raise CheckpointError(f"The model cannot be written to {path}: {error}") from error


class TorchPolicy(PolicyModel):
    """A causal language model under AdamW. `model` must have packed attention installed (`loading.py`)."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: OptimizerSettings,
        *,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.module = model
        self._tokenizer = tokenizer
        self._forward = _PackedForward(model, temperature=temperature)
        self._checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = MasterOptimizer(model, settings)

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """See `PolicyModel.score`."""
        return self._forward.scores(batch)

    def update(self, micro_batches: Sequence[PackedBatch], objective: PolicyObjective) -> dict[str, float]:
        """See `PolicyModel.update`."""
        if self._checkpointing:
            self._train_without_dropout()
        try:
            return _optimizer_step(
                micro_batches, lambda batch: objective(self._forward.scores(batch), batch), self._optimizer
            )
        finally:
            self.module.eval()

    def _train_without_dropout(self) -> None:
        """transformers recomputes activations in train mode only, but ratios need a deterministic policy."""
        self.module.train()
        for module in self.module.modules():
            if isinstance(module, nn.Dropout):
                module.eval()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `PolicyModel.weights`."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def save(self, path: Path) -> None:
        """See `PolicyModel.save`."""
        _save_pretrained(self.module, self._tokenizer, path)

    def state_dict(self) -> dict[str, Any]:
        """See `PolicyModel.state_dict`."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PolicyModel.load_state_dict`."""
        self._optimizer.load_state_dict(state)


class TorchReference(ReferenceModel):
    """A frozen causal language model."""

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        self._forward = _PackedForward(model.requires_grad_(False), temperature=temperature)

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """See `ReferenceModel.score`."""
        return self._forward.scores(batch)


class TorchValue(ValueModel):
    """A language model whose vocabulary head is replaced by one scalar a token.

    `head`: `weight` [1, H] and, if there is one, `bias` [1] to start from (a reward model's, say); empty starts from
    values of 0.
    """

    def __init__(
        self, model: Any, tokenizer: Any, settings: OptimizerSettings, *, head: Mapping[str, Tensor] | None = None
    ) -> None:
        self._forward = _PackedForward(model)
        self._tokenizer = tokenizer
        self._model = model
        backbone = model.base_model
        self._value_head = nn.Linear(model.config.hidden_size, 1, device=self._forward.device)
        nn.init.zeros_(self._value_head.weight)  # values start at 0: no bias from an untrained head
        nn.init.zeros_(self._value_head.bias)
        if head:
            self._value_head.load_state_dict({"bias": self._value_head.bias.detach(), **head})
        self._optimizer = MasterOptimizer(nn.ModuleDict({"model": backbone, "value_head": self._value_head}), settings)

    def _values(self, batch: PackedBatch) -> Tensor:
        hidden_AH, action_A = self._forward.action_hidden(batch)
        return _scatter(self._value_head(hidden_AH.float())[:, 0], action_A, batch)

    @torch.no_grad()
    def values(self, batch: PackedBatch) -> Tensor:
        """See `ValueModel.values`."""
        return self._values(batch)

    def update(self, micro_batches: Sequence[PackedBatch], objective: ValueObjective) -> dict[str, float]:
        """See `ValueModel.update`."""
        return _optimizer_step(micro_batches, lambda batch: objective(self._values(batch), batch), self._optimizer)

    def save(self, path: Path) -> None:
        """Writes the backbone as a Hugging Face model and the head as `value_head.safetensors`."""
        from safetensors.torch import save_file

        _save_pretrained(self._model.base_model, self._tokenizer, path)
        save_file(
            {f"value_head.{k}": v.contiguous() for k, v in self._value_head.state_dict().items()},
            path / "value_head.safetensors",
        )

    def state_dict(self) -> dict[str, Any]:
        """See `ValueModel.state_dict`."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ValueModel.load_state_dict`."""
        self._optimizer.load_state_dict(state)
