"""Policy, critic and reference over packed batches.

A `TrainedModule` takes the optimizer's steps. It is on this process's device, or divided over processes, each of which
then holds one of these objects and calls it at the same time with samples of its own.
Does not own: losses (the objective is an argument), batching, nor the engines that get the weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.chunked_logprobs import CHUNK_BYTES
from rollgrad.adapters.models.torch.distillation import KeptTeacher, Teacher
from rollgrad.adapters.models.torch.expert_balance import balance_weights, check_routers
from rollgrad.adapters.models.torch.forward import PackedLM, PackedValue, live_targets, scatter
from rollgrad.adapters.models.torch.lora import (
    NamedWeight,
    adapter_weights,
    plain_buffers,
    plain_weights,
    save_adapter,
    without_adapters,
)
from rollgrad.adapters.models.torch.neftune import EmbeddingNoise
from rollgrad.adapters.models.torch.optimizer import MasterOptimizer, OptimizerSettings, TrainedModule
from rollgrad.adapters.models.torch.saving import save_pretrained, writing
from rollgrad.adapters.models.torch.sequence_parallel import sequence_group
from rollgrad.domain.batches.metrics import Total, joined
from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.errors import CheckpointError, NonFiniteUpdateError
from rollgrad.domain.ports.models import (
    LossOutput,
    PolicyModel,
    PolicyObjective,
    Predictions,
    ReferenceModel,
    TeacherModel,
    TokenScores,
    ValueModel,
    ValueObjective,
)

Optimize = Callable[[nn.Module, OptimizerSettings], TrainedModule]
"""Function that puts a module under an optimizer."""

ADAPTER_DIRECTORY = "adapter"
"""Directory of the adapters, below that of a saved policy."""

AVERAGE_DIRECTORY = "ema"
"""Directory of the model with averaged weights, below that of a saved policy."""

GATHERED_BYTES = 64 * 2**20
"""Bytes of divided weights that are gathered at a time."""


def optimizer_step(
    micro_batches: Sequence[Batch], loss_of: Callable[[Batch], LossOutput], trained: TrainedModule
) -> dict[str, float]:
    """Accumulates the micro-batches' gradients and steps once."""
    parts: list[Mapping[str, Tensor | float]] = []
    for batch in micro_batches:
        output = loss_of(batch)
        loss = float(output.loss.detach())
        if not trained.agree(bool(torch.isfinite(output.loss))):
            trained.clear()
            raise NonFiniteUpdateError(f"The loss is {loss}; the optimizer step was not applied.")
        trained.backward(output.loss)
        parts.append(joined([{"loss": Total(loss)}, output.metrics]))
    return joined(parts) | trained.step()


def train_without_dropout(model: nn.Module) -> None:
    """Puts a model in train mode without dropout: transformers recomputes activations in train mode only, but
    ratios need a deterministic policy."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()


def save_averaged(save: Callable[[Path], None], path: Path, trained: TrainedModule | None) -> None:
    """Saves a model to `path`, and the one of averaged weights to `ema` below it, if `trained` keeps averages.

    Raises:
        OSError: the model cannot be written.
    """
    error: OSError | None = None
    try:
        save(path)
    except OSError as raised:
        error = raised
    # All processes have parts of the averages that one of them writes.
    if trained is not None and trained.agree(error is None):
        with trained.averaged():
            save(path / AVERAGE_DIRECTORY)
    if error is not None:
        raise error


def check_same_weights(
    state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], trained: TrainedModule
) -> None:
    """Checks that a state is of a run that trained these parameters.

    Raises:
        CheckpointError: it is of other weights.
    """
    masters = state["masters"]
    if parameters.keys() != masters.keys() or any(
        masters[name].numel() * parameter.element_size() != trained.bytes(parameter)
        for name, parameter in parameters.items()
    ):
        raise CheckpointError(
            "The state to continue from is of a run that trained other weights: set --actor.lora.rank, "
            "--actor.lora.target_modules and --actor.model_name_or_path to what they were."
        )


def weight_values(weights: Sequence[NamedWeight], trained: TrainedModule) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight once; a weight divided over processes is whole only until the next one is requested."""
    run: list[NamedWeight] = []
    filled = 0
    for weight in [*weights, None]:
        size = 0 if weight is None else sum(map(trained.bytes, weight.parameters))
        if run and (weight is None or filled + size > GATHERED_BYTES):
            with trained.gathered([parameter for member in run for parameter in member.parameters]):
                for member in run:
                    yield member.name, member.value()
            run, filled = [], 0
        if weight is not None:
            run.append(weight)
            filled += size


def copied_weights(weights: Iterator[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Returns copies on the CPU. Without `keep` it only goes through the weights, as every process must."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights if keep}


def _token_scores(scored: Sequence[Tensor], batch: PackedBatch) -> TokenScores:
    logprobs_A, entropy_A, *more = scored
    return TokenScores(
        logprobs_N=scatter(logprobs_A, batch),
        entropy_N=scatter(entropy_A, batch),
        correct_N=scatter(more[0], batch) if more else None,
        mean_logprobs_N=scatter(more[1], batch) if more else None,
    )


class TorchPolicy(PolicyModel):
    """A causal language model under an optimizer. `model` must have packed attention installed (`loading.py`).

    Of a model with adapters (`lora.py`) the state is theirs alone; weights, and the model that is saved, have them
    merged.

    Args:
        model: the model that is trained.
        tokenizer: saved beside it.
        settings: of the optimizer.
        temperature: of the distribution of log-probs and entropy.
        gradient_checkpointing: recompute activations in the backward pass.
        aux_loss_coef: weight of the load-balancing loss of a mixture of experts (`expert_balance.py`), which takes
            another forward pass.
        correct: whether scores say which tokens are the most likely ones, and the mean log-prob over the vocabulary.
        neftune_alpha: size of the noise on embeddings in updates (`neftune.py`).
        teacher: gives scores the divergence from it, in place of that mean; None gives none.
        outcomes: two tokens that scores compare as what follows each action token; None compares none.
        optimize: puts the model under an optimizer.

    Raises:
        ConfigurationError: `aux_loss_coef` is set, but the model is no mixture of experts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: OptimizerSettings,
        *,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        aux_loss_coef: float = 0.0,
        correct: bool = False,
        neftune_alpha: float = 0.0,
        teacher: Teacher | KeptTeacher | None = None,
        outcomes: tuple[int, int] | None = None,
        optimize: Optimize = MasterOptimizer,
    ) -> None:
        if aux_loss_coef:
            check_routers(model, aux_loss_coef)
        self.module = model
        self._aux_loss_coef = aux_loss_coef
        self._tokenizer = tokenizer
        self._checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._averages = settings.ema_beta is not None
        packed = PackedLM(model, temperature=temperature, correct=correct, teacher=teacher, outcomes=outcomes)
        self._noise = EmbeddingNoise(packed, model, neftune_alpha) if neftune_alpha else None
        self._trained = optimize(packed, settings)
        self._taught = teacher is not None
        self._compares = outcomes is not None
        self.steps = 0
        """Optimizer steps begun."""

    def _scores(self, batch: PackedBatch) -> TokenScores:
        return self._token_scores(self._trained(batch), batch)

    def _token_scores(self, scored: Sequence[Tensor], batch: PackedBatch) -> TokenScores:
        if self._compares:
            logprobs_N, entropy_N, odds_N = (scatter(column_A, batch) for column_A in scored)
            return TokenScores(logprobs_N=logprobs_N, entropy_N=entropy_N, odds_N=odds_N)
        if not self._taught:
            return _token_scores(scored, batch)
        logprobs_N, entropy_N, correct_N, divergence_N = (scatter(column_A, batch) for column_A in scored)
        return TokenScores(logprobs_N=logprobs_N, entropy_N=entropy_N, correct_N=correct_N, divergence_N=divergence_N)

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `PolicyModel.score`."""
        return self._scores(batch)

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        """Implements `PolicyModel.update`."""
        self.steps += 1
        if self._checkpointing:
            train_without_dropout(self.module)
        try:
            with nullcontext() if self._noise is None else self._noise.during(self._trained.steps):
                if not self._aux_loss_coef:
                    scored = self._scores
                    return optimizer_step(micro_batches, lambda batch: objective(scored(batch), batch), self._trained)
                weights_E = self._balance_weights(micro_batches)
                balanced = partial(self._balanced, objective=objective, weights_E=weights_E)
                return optimizer_step(micro_batches, balanced, self._trained)
        finally:
            self.module.eval()

    @torch.no_grad()
    def _balance_weights(self, micro_batches: Sequence[PackedBatch]) -> Tensor:
        """Returns the balance weights of the whole step, over all processes. They come before any gradient, because
        they depend on all choices of the routers."""
        tokens_E = torch.stack([self._trained(batch, True)[-2] for batch in micro_batches]).sum(0)
        return balance_weights(self._trained.summed(tokens_E), self.module.config.num_experts_per_tok)

    def _balanced(self, batch: Batch, *, objective: PolicyObjective[Batch], weights_E: Tensor) -> LossOutput:
        """Returns the objective plus the batch's share of the load-balancing loss."""
        *scored, _, probabilities_E = self._trained(batch, True)
        output = objective(self._token_scores(scored, batch), batch)
        share = (weights_E * probabilities_E).sum().to(output.loss.device)
        loss = output.loss + self._aux_loss_coef * share
        return LossOutput(loss=loss, metrics={**output.metrics, "aux_loss": Total(share)})

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Implements `PolicyModel.weights`."""
        return weight_values(plain_weights(self.module), self._trained)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapters' own weights, by their names in peft's files; nothing without adapters."""
        return weight_values(adapter_weights(self.module), self._trained)

    def save(self, path: Path) -> None:
        """Implements `PolicyModel.save`. Adapters alone are in `adapter` below it, in peft's format; the model of
        averaged weights, if they are kept, in `ema`."""
        save_averaged(self._save, path, self._trained if self._averages else None)

    def _save(self, path: Path) -> None:
        trained = self._trained
        if not trained.divided and not adapter_weights(self.module):
            save_pretrained(self.module, self._tokenizer, path)
            return
        weights = copied_weights(self.weights(), keep=trained.first)
        of_adapters = copied_weights(self.adapter(), keep=trained.first)
        if trained.first:
            save_pretrained(self.module, self._tokenizer, path, weights | plain_buffers(self.module))
            if of_adapters:
                save_adapter(self.module, of_adapters, path / ADAPTER_DIRECTORY)

    def state_dict(self) -> dict[str, Any]:
        """Implements `PolicyModel.state_dict`."""
        return self._trained.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `PolicyModel.load_state_dict`.

        Raises:
            CheckpointError: the state belongs to other weights; nothing has changed.
        """
        trained = {f"model.{name}": p for name, p in self.module.named_parameters() if p.requires_grad}
        check_same_weights(state, trained, self._trained)
        self._trained.load_state_dict(state)


class TorchReference(ReferenceModel):
    """A frozen causal language model. `divide` divides it over several processes, and returns its forward pass."""

    def __init__(
        self, model: Any, *, temperature: float = 1.0, divide: Callable[[nn.Module], Callable[..., Any]] | None = None
    ) -> None:
        module = PackedLM(model.requires_grad_(False), temperature=temperature)
        self._forward = divide(module) if divide else module

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`."""
        return _token_scores(self._forward(batch), batch)


class TorchTeacher(TeacherModel):
    """A teacher whose most likely tokens are to be kept; of its vocabulary the first `size` tokens count."""

    def __init__(self, teacher: Teacher, size: int) -> None:
        self._teacher = teacher
        self._size = size
        self._group = sequence_group(teacher.model)

    def predict(self, batch: PackedBatch) -> Predictions:
        """Implements `TeacherModel.predict`."""
        targets = live_targets(self._teacher, batch, self._group, self._size)
        count, rows = int(batch.action_mask_N.sum()), max(1, CHUNK_BYTES // (4 * self._size))
        found = [targets(slice(start, start + rows)) for start in range(0, count, rows)]
        return Predictions(
            ids_AK=torch.cat([each.ids_AK for each in found if each.ids_AK is not None]).int().cpu(),
            logprobs_AB=torch.cat([each.logprobs_AB for each in found]).half().cpu(),
        )


class AdapterlessReference(ReferenceModel):
    """The policy without its adapters, on the policy's own weights, with which nothing else may compute meanwhile."""

    def __init__(self, policy: TorchPolicy) -> None:
        self._policy = policy

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`."""
        with without_adapters(self._policy.module):
            return self._policy.score(batch)


class TorchValue(ValueModel):
    """A language model whose vocabulary head is replaced by one scalar a token.

    `head`: `weight` [1, H] and, if there is one, `bias` [1] to start from (a reward model's, say); empty starts from
    values of 0.
    """

    packed: type[PackedValue] = PackedValue
    """Module that computes the values."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: OptimizerSettings,
        *,
        head: Mapping[str, Tensor] | None = None,
        optimize: Optimize = MasterOptimizer,
    ) -> None:
        self._tokenizer = tokenizer
        self._module = self.packed(model, dict(head or {}))
        self._trained = optimize(self._module, settings)

    def _values(self, batch: PackedBatch) -> Tensor:
        return scatter(self._trained(batch), batch)

    @torch.no_grad()
    def values(self, batch: PackedBatch) -> Tensor:
        """Implements `ValueModel.values`."""
        return self._values(batch)

    def update(self, micro_batches: Sequence[Batch], objective: ValueObjective[Batch]) -> dict[str, float]:
        """Implements `ValueModel.update`."""
        return optimizer_step(micro_batches, lambda batch: objective(self._values(batch), batch), self._trained)

    def save(self, path: Path) -> None:
        """Writes the backbone as a Hugging Face model and the head as `value_head.safetensors`."""
        from safetensors.torch import save_file

        weights = copied_weights(weight_values(plain_weights(self._module), self._trained), keep=self._trained.first)
        if self._trained.first:
            of_body = {name.removeprefix("model."): t for name, t in weights.items() if name.startswith("model.")}
            save_pretrained(self._module.model, self._tokenizer, path, of_body)
            head = {name: tensor for name, tensor in weights.items() if name.startswith("value_head.")}
            with writing(path):
                save_file(head, path / "value_head.safetensors")

    def state_dict(self) -> dict[str, Any]:
        """Implements `ValueModel.state_dict`."""
        return self._trained.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `ValueModel.load_state_dict`."""
        self._trained.load_state_dict(state)
