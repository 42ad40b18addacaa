"""Models whose layers two processes divide among them: importable there."""

from functools import partial
from typing import Any

import torch
from attrs import evolve

from rollgrad.adapters.models.deepspeed import tensor_parallel
from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.torch.heads.allowed_tokens import follow_grammars
from rollgrad.adapters.models.torch.heads.distillation import DistillationSettings, Teacher
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.weight_shards import shard_rows
from rollgrad.adapters.models.torch.models import Optimize, TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.domain.algorithms.losses.centering import ScoreCentering
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.ports.models import LossOutput, TokenScores
from tests.fakes import cluster
from tests.fakes.grammars import chance_masks

SIZE = 2


def divided(stage: int) -> Optimize:
    return partial(DeepSpeedModule, division=DeepSpeedSettings(zero_stage=stage, tensor_parallel_size=SIZE))


def rank_policy(path: str, stage: int, dtype: torch.dtype = torch.float32) -> RankPolicy:
    return RankPolicy(cluster.policy(path, divided(stage), dtype=dtype, shard=shard_rows))


def taught_policy(path: str, optimize: Optimize = MasterOptimizer, **loading: Any) -> TorchPolicy:
    """It learns from another model of the same size, over the whole vocabulary."""
    load = partial(load_causal_lm, path, dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG)
    other = load()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.8)
    teacher = Teacher(other, DistillationSettings(beta=1.0, temperature=0.7))
    tokenizer = load_tokenizer(path, flag=cluster.FLAG)
    return TorchPolicy(load(**loading), tokenizer, cluster.SETTINGS, teacher=teacher, optimize=optimize)


def judging_policy(path: str, optimize: Optimize = MasterOptimizer, **loading: Any) -> TorchPolicy:
    """It compares two tokens, as a process reward model does; its processes have one each."""
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG, **loading)
    outcomes = (5, model.config.vocab_size - 2)
    tokenizer = load_tokenizer(path, flag=cluster.FLAG)
    return TorchPolicy(model, tokenizer, cluster.SETTINGS, outcomes=outcomes, optimize=optimize)


def following_policy(path: str, optimize: Optimize = MasterOptimizer, **loading: Any) -> TorchPolicy:
    """It follows the grammars of replies."""
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG, **loading)
    follow_grammars(model, chance_masks(model.config.vocab_size))
    return TorchPolicy(model, load_tokenizer(path, flag=cluster.FLAG), cluster.SETTINGS, optimize=optimize)


def centred_policy(path: str, optimize: Optimize = MasterOptimizer, **loading: Any) -> TorchPolicy:
    """It finds the mean score over the tokens that were likely to a sampler."""
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG, **loading)
    tokenizer = load_tokenizer(path, flag=cluster.FLAG)
    return TorchPolicy(model, tokenizer, cluster.SETTINGS, centering=ScoreCentering(), optimize=optimize)


def told(batch: PackedBatch, vocabulary: int, top_k: int = 8) -> PackedBatch:
    """The batch with the most likely tokens of a policy that sampled it."""
    generator = torch.Generator().manual_seed(5)
    top = (3 * torch.randn(batch.token_count, vocabulary, generator=generator)).log_softmax(1).topk(top_k, dim=1)
    return evolve(batch, sampler_ids_NK=top.indices.int(), sampler_logprobs_NK=top.values)


POLICIES = {
    "taught": taught_policy,
    "judging": judging_policy,
    "following": following_policy,
    "centred": centred_policy,
}


def rank_own_policy(name: str, path: str, stage: int) -> RankPolicy:
    return RankPolicy(POLICIES[name](path, divided(stage), shard=shard_rows))


def by_divergence(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """The divergence from a teacher, or the log-prob of the first of two tokens, with the mean score taken out."""
    values_N = -scores.logprobs_N if scores.divergence_N is None else scores.divergence_N
    values_N = values_N if scores.mean_score_N is None else values_N + scores.mean_score_N
    mean = (part.filled("loss_weights_N") * values_N).sum()
    return LossOutput(loss=mean, metrics={"mean": mean.detach()})


def rank_value(path: str, stage: int) -> TorchValue:
    return cluster.value(path, divided(stage), shard=shard_rows)


def rank_reference(path: str, dtype: torch.dtype) -> TorchReference:
    model = load_causal_lm(path, dtype=dtype, device=torch.device("cpu"), flag=cluster.FLAG, shard=shard_rows)
    return TorchReference(model, divide=partial(tensor_parallel.divided, size=SIZE))
