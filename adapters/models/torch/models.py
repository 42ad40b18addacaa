"""The policy over packed batches, and what all trained models share.

A `TrainedModule` takes the optimizer's steps. It is on this process's device, or divided over processes, each of which
then holds one of these objects and calls it at the same time with samples of its own.
Does not own: losses (the objective is an argument), batching, nor the engines that get the weights.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.experts.expert_balance import StepRouting, check_routers
from rollgrad.adapters.models.torch.experts.router_replay import scored_with_experts
from rollgrad.adapters.models.torch.forward import PackedLM, predicted, scattered
from rollgrad.adapters.models.torch.heads.distillation import KeptTeacher, Teacher
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.lora import (
    NamedWeight,
    adapter_weights,
    plain_buffers,
    plain_weights,
    save_adapter,
)
from rollgrad.adapters.models.torch.loading.saving import save_in_files, save_pretrained
from rollgrad.adapters.models.torch.loading.weight_shards import whole_layers
from rollgrad.adapters.models.torch.neftune import EmbeddingNoise
from rollgrad.adapters.models.torch.optimizers.gradients import optimizer_step
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.optimizers.optimizer_state import check_same_weights
from rollgrad.adapters.models.torch.optimizers.state_copy import CopiesState
from rollgrad.adapters.models.torch.optimizers.stored_state import opened
from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule
from rollgrad.adapters.models.torch.recomputation import Recomputation
from rollgrad.adapters.models.torch.sent_names import sent_buffers, sent_weights
from rollgrad.adapters.models.torch.weight_parts import weight_parts
from rollgrad.adapters.weights.shared_buckets import Run
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.algorithms.losses.centering import ScoreCentering
from rollgrad.domain.batches.metrics import Total
from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.ports.models import (
    LossOutput,
    PolicyModel,
    PolicyObjective,
    PredictingModel,
    Predictions,
    TokenScores,
)

Optimize = Callable[[nn.Module, OptimizerSettings], TrainedModule]
"""Function that puts a module under an optimizer."""

ADAPTER_DIRECTORY = "adapter"
"""Directory of the adapters, below that of a saved policy."""

AVERAGE_DIRECTORY = "ema"
"""Directory of the model with averaged weights, below that of a saved policy."""

FILE_BYTES = 5 * 10**9
"""Bytes of the weights in one file of a model that several processes divide; the process that writes has as many in
memory. A layer that is larger has a file of its own."""

GATHERED_BYTES = 64 * 2**20
"""Bytes of divided weights that are gathered at a time."""


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


def weight_values(weights: Sequence[NamedWeight], trained: TrainedModule) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight once; a weight divided over processes is whole only until the next one is requested."""
    run: list[NamedWeight] = []
    filled = 0
    for weight in [*weights, None]:
        size = 0 if weight is None else sum(map(trained.bytes, weight.parameters))
        if run and (weight is None or filled + size > GATHERED_BYTES):
            with trained.gathered([parameter for member in run for parameter in member.parameters]) as whole:
                for member in run:
                    yield member.name, member.value(whole)
            run, filled = [], 0
        if weight is not None:
            run.append(weight)
            filled += size


def file_parts(weights: Sequence[NamedWeight], trained: TrainedModule) -> Iterator[dict[str, Tensor]]:
    """Yields copies of all weights on the CPU, as many as one file has: whole layers, because transformers makes the
    tensors of its files from several weights of a layer. Only the first process gets them."""
    part: list[NamedWeight] = []
    filled = 0
    for _, layer in groupby(weights, key=lambda weight: _layer(weight.name)):
        members = list(layer)
        size = sum(trained.bytes(parameter) for member in members for parameter in member.parameters)
        if part and filled + size > FILE_BYTES:
            yield copied_weights(weight_values(part, trained), keep=trained.first)
            part, filled = [], 0
        part += members
        filled += size
    yield copied_weights(weight_values(part, trained), keep=trained.first)


def _layer(name: str) -> str:
    """Returns the beginning of a weight's name up to the number of its layer; all of it outside of layers."""
    found = re.match(r"(.*?\.\d+\.)", name)
    return name if found is None else found[1]


def copied_weights(weights: Iterator[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Returns copies on the CPU. Without `keep` it only goes through the weights, as every process must."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights if keep}


def token_scores(scored: Sequence[Tensor], batch: PackedBatch, *, mean: bool = True) -> TokenScores:
    """Returns the scores of a batch from the columns of its action tokens."""
    means = ("mean_logprobs_N",) if mean else ()
    names = ("logprobs_N", "entropy_N", "correct_N", *means, "collision_N")
    return TokenScores(**dict(zip(names, scattered(scored, batch), strict=False)))


CENTRED = ("logprobs_N", "entropy_N", "mean_score_N", "policy_mass_N", "residual_N")
"""Columns of scores that are centred; those without a gradient, which are not learned from, have the first two."""


class TorchPolicy(CopiesState, PolicyModel, PredictingModel):
    """A causal language model under an optimizer. `model` must have packed attention installed (`loading.py`).

    Of a model with adapters (`lora.py`) the state is theirs alone; weights, and the model that is saved, have them
    merged.

    Args:
        model: the model that is trained.
        tokenizer: saved beside it.
        settings: settings of the optimizer.
        temperature: temperature of the distribution of log-probs and entropy.
        gradient_checkpointing: which activations the backward pass computes again.
        offload_activations: keep what it computes them from in the machine's memory.
        aux_loss_coef: weight of the load-balancing loss of a mixture of experts (`expert_balance.py`).
        router_z_loss_coef: weight of its routers' z-loss; each of the two, or both, takes another forward pass.
        correct: whether scores say which tokens are the most likely ones.
        mean: whether they then have the mean log-prob over the vocabulary, too.
        collision: whether they then have the collision entropy, too.
        neftune_alpha: size of the noise on embeddings in updates (`neftune.py`).
        teacher: gives scores the divergence from it, in place of that mean; None gives none.
        outcomes: two tokens that scores compare as what follows each action token; None compares none.
        keeps_experts: whether scores say which experts each token went to, of a model with `install_router_replay`.
        centering: finds in updates what score centering takes out; none of `correct`, `teacher` and `outcomes` is given
            with it.
        optimize: puts the model under an optimizer.

    Raises:
        ConfigurationError: a loss of routers has a weight, but the model is no mixture of experts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: OptimizerSettings,
        *,
        temperature: float = 1.0,
        gradient_checkpointing: Checkpointing = Checkpointing.OFF,
        offload_activations: bool = False,
        aux_loss_coef: float = 0.0,
        router_z_loss_coef: float = 0.0,
        correct: bool = False,
        mean: bool = True,
        collision: bool = False,
        neftune_alpha: float = 0.0,
        teacher: Teacher | KeptTeacher | None = None,
        outcomes: tuple[int, int] | None = None,
        keeps_experts: bool = False,
        centering: ScoreCentering | None = None,
        optimize: Optimize = MasterOptimizer,
    ) -> None:
        coefs = {"aux_loss": aux_loss_coef, "router_z_loss": router_z_loss_coef}
        self._coefs = {name: coef for name, coef in coefs.items() if coef}
        if self._coefs:
            with whole_layers(model):
                check_routers(model, self._coefs)
        self.module = model
        self._tokenizer = tokenizer
        self._dropout = AdapterDropout(model)
        self._keeps_experts, self._mean = keeps_experts, mean
        self._recomputation = Recomputation(model, self._dropout, gradient_checkpointing, offloads=offload_activations)
        self._averages = settings.ema_beta is not None and settings.ema_saved
        packed = PackedLM(
            model,
            temperature=temperature,
            correct=correct,
            mean=mean,
            collision=collision,
            teacher=teacher,
            outcomes=outcomes,
            centering=centering,
        )
        self._dropout.of(packed, packed.group)
        self._noise = EmbeddingNoise(packed, model, neftune_alpha) if neftune_alpha else None
        self._trained = optimize(packed, settings)
        self._teaches = packed.teaches
        self._compares = outcomes is not None
        self._centred = centering is not None
        self.steps = 0

    def padded(self) -> bool:
        """Implements `PolicyModel.padded`."""
        return is_padded(self.module)

    def _scores(self, batch: PackedBatch) -> TokenScores:
        return self._token_scores(self._trained(batch), batch)

    def _token_scores(self, scored: Sequence[Tensor], batch: PackedBatch) -> TokenScores:
        if self._compares:
            logprobs_N, entropy_N, odds_N = scattered(scored, batch)
            return TokenScores(logprobs_N=logprobs_N, entropy_N=entropy_N, odds_N=odds_N)
        if self._centred:
            return TokenScores(**dict(zip(CENTRED, scattered(scored, batch), strict=False)))
        if not self._teaches(batch):
            return token_scores(scored, batch, mean=self._mean)
        logprobs_N, entropy_N, correct_N, divergence_N = scattered(scored, batch)
        return TokenScores(logprobs_N=logprobs_N, entropy_N=entropy_N, correct_N=correct_N, divergence_N=divergence_N)

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `PolicyModel.score`."""
        return scored_with_experts(self.module, batch, self._scores) if self._keeps_experts else self._scores(batch)

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Implements `PredictingModel.predict`."""
        return predicted(self._trained, batch, top_k)

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        """Implements `PolicyModel.update`."""
        self.steps += 1
        noise = nullcontext() if self._noise is None else self._noise.during(self._trained.steps)
        with self._recomputation.during(self.module), noise, self._dropout.during(self._trained.steps):
            if not self._coefs:
                return optimizer_step(micro_batches, self._scores, objective, self._trained)
            routed = partial(self._routed, objective=objective, step=self._routing(micro_batches))
            return optimizer_step(micro_batches, lambda batch: self._trained(batch, True), routed, self._trained)

    @torch.no_grad()
    def _routing(self, micro_batches: Sequence[PackedBatch]) -> StepRouting:
        """Returns the routing of the whole step, over all processes: losses of routers depend on all their choices."""
        tokens_E = torch.stack([self._trained(batch, True)[-3] for batch in micro_batches]).sum(0)
        return StepRouting(self._trained.summed(tokens_E), self.module.config.num_experts_per_tok)

    def _routed(
        self, outputs: Sequence[Tensor], batch: Batch, *, objective: PolicyObjective[Batch], step: StepRouting
    ) -> LossOutput:
        """Returns the objective plus the batch's share of the losses of routers."""
        *scored, _, probabilities_E, squares = outputs
        output = objective(self._token_scores(scored, batch), batch)
        shares = {name: share for name, share in step.losses(probabilities_E, squares).items() if name in self._coefs}
        loss = output.loss + sum(self._coefs[name] * share.to(output.loss.device) for name, share in shares.items())
        return LossOutput(loss=loss, metrics={**output.metrics, **{n: Total(s.detach()) for n, s in shares.items()}})

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Implements `PolicyModel.weights`."""
        return chain(weight_values(sent_weights(self.module), self._trained), sent_buffers(self.module).items())

    def own_parts(self) -> Iterator[Run] | None:
        """Returns what this process has of each weight (`weight_parts`)."""
        return weight_parts(sent_weights(self.module), sent_buffers(self.module), self._trained)

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
        of_adapters = copied_weights(self.adapter(), keep=trained.first)  # by all processes, whatever fails below
        parts = self._with_buffers(file_parts(plain_weights(self.module), trained))
        save_in_files(self.module, self._tokenizer, path, parts, writes=trained.first)
        if of_adapters:
            save_adapter(self.module, of_adapters, path / ADAPTER_DIRECTORY)

    def _with_buffers(self, parts: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yields the parts, of which the first has the model's buffers, too."""
        buffers = plain_buffers(self.module)
        for weights in parts:
            yield weights | buffers
            buffers = {}

    def state_dict(self) -> dict[str, Any]:
        """Implements `PolicyModel.state_dict`."""
        return self._trained.state_dict()

    def averaged(self) -> AbstractContextManager[None]:
        """Implements `AveragedPolicy.averaged`."""
        return self._trained.averaged()

    def sleep(self) -> None:
        """Leaves the GPU's memory of the optimizer to others, until the next update."""
        self._trained.sleep()

    def write_state(self, directory: Path) -> None:
        """Writes the state, or this process's part of it, to files in `directory`."""
        self._trained.write_state(directory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `PolicyModel.load_state_dict`.

        Raises:
            CheckpointError: the state belongs to other weights; nothing has changed.
        """
        state = opened(state)
        trained = {f"model.{name}": p for name, p in self.module.named_parameters() if p.requires_grad}
        check_same_weights(state, trained, self._trained)
        self._trained.load_state_dict(state)
