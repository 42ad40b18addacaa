"""A policy whose gradients and optimizer steps are asked for one by one, and the adapters of several on one base model.

Invariant: models that share a base share its tensors, none of which is ever changed or trained; each has adapters and
modules of its own, so that they may compute at the same time.
"""

import copy
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.gradients import accumulate_gradients
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.ports.models import AdamRates, PolicyObjective, StepwisePolicy, TokenScores


def with_own_adapters(base: Any, lora: LoraConfig, *, seed: int) -> Any:
    """Returns a model with fresh adapters on the tensors of `base`, which has none and stays as it is.

    Args:
        base: a model as `load_causal_lm` returns it.
        lora: what adapters there are; `rank` is above 0.
        seed: seed of the adapters.
    """
    base.requires_grad_(False)
    shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    model = copy.deepcopy(base, shared)
    add_lora(model, lora, seed=seed)
    return model


class TorchStepwisePolicy(TorchPolicy, StepwisePolicy):
    """A `StepwisePolicy` in this process.

    Args:
        model: as for `TorchPolicy`.
        tokenizer: saved beside it.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._settings = OptimizerSettings(lr=0.0)
        self._optimizer: MasterOptimizer
        super().__init__(model, tokenizer, self._settings, optimize=self._optimize)

    def _optimize(self, module: Any, settings: OptimizerSettings) -> MasterOptimizer:
        self._optimizer = MasterOptimizer(module, settings)
        return self._optimizer

    def accumulate(self, passes: Passes[Batch], objective: PolicyObjective[Batch]) -> tuple[Tensor, dict[str, float]]:
        """Implements `StepwisePolicy.accumulate`."""
        found: list[Tensor] = []

        def scored(batch: Batch) -> TokenScores:
            scores = self._scores(batch)
            found.append(scores.logprobs_N.detach())
            return scores

        metrics = accumulate_gradients(passes, scored, objective, self._optimizer)
        return passes.merged(found), metrics

    @torch.no_grad()
    def evaluate(self, passes: Passes[Batch], objective: PolicyObjective[Batch]) -> tuple[Tensor, float]:
        """Implements `StepwisePolicy.evaluate`."""
        scores = [self._scores(batch) for batch in passes]
        losses = [float(objective(each, batch).loss) for each, batch in zip(scores, passes, strict=True)]
        return passes.merged([each.logprobs_N for each in scores]), sum(losses)

    def step(self, rates: AdamRates) -> dict[str, float]:
        """Implements `StepwisePolicy.step`."""
        self.steps += 1
        self._optimizer.use(
            evolve(
                self._settings,
                lr=rates.lr,
                betas=rates.betas,
                eps=rates.eps,
                weight_decay=rates.weight_decay,
                max_norm=rates.max_norm,
            )
        )
        return self._optimizer.step()

    def clear(self) -> None:
        """Implements `StepwisePolicy.clear`."""
        self._optimizer.clear()
