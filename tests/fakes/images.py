"""Small models that see images, which the processes of a test's cluster hold, and batches for them."""

from typing import Any

import torch
from attrs import evolve

from rollgrad.adapters.chat.pictures import ImageRenderer, load_processor
from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.torch.layers.sequence_parallel import join_sequence_group
from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.adapters.models.torch.loading.weight_shards import Shard
from rollgrad.adapters.models.torch.models import Optimize, TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.application.settings.sections.actor import DType, ModelConfig
from rollgrad.domain.batches.examples import ExampleBatch, pack_sequences
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.entrypoints.composition.models import make_actor_model
from tests.fakes import cluster, sequence_parallel
from tests.tiny_vision import ask, codec_of, picture

RED, WIDE = picture((200, 0, 0)), picture((0, 150, 0), width=56, height=24)


def processor(path: str) -> Any:
    return load_processor(path, load_tokenizer(path, flag=cluster.FLAG), flag=cluster.FLAG)


def policy(path: str, optimize: Optimize = MasterOptimizer, shard: Shard | None = None) -> TorchPolicy:
    """A policy whose images are checked as a run checks them."""
    made = processor(path)
    actor = ModelConfig(model_name_or_path=path, dtype=DType.FLOAT32)
    model = make_actor_model(actor, images=ImageRenderer(made), shard=shard)
    return TorchPolicy(model, made.tokenizer, cluster.SETTINGS, optimize=optimize)


def rank_policy(path: str, stage: int | str, width: int = 1) -> RankPolicy:
    """Makes one process's part of a policy whose sequences `width` processes share."""
    join_sequence_group(width, timeout=sequence_parallel.TIMEOUT)
    return RankPolicy(policy(path, cluster.divided(stage), cluster.loading(stage)))


def reward_model(path: str, **division: Any) -> RewardModel:
    """A reward model whose passes have a text or two."""
    made = processor(path)
    return RewardModel.load(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        flag=cluster.FLAG,
        policy_tokenizer=made.tokenizer,
        batch_tokens=40,
        images=ImageRenderer(made),
        **division,
    )


def rank_reward_model(path: str, stage: int | str) -> RewardModel:
    return reward_model(path, shard=cluster.loading(stage), divide=cluster.dividing(stage, False))


def replies(path: str) -> list[RewardInput]:
    """The sequences of `batch`."""
    packed = batch(path)
    bounds = zip(packed.starts_S.tolist(), packed.lengths_S.tolist(), packed.images_S, strict=True)
    return [
        RewardInput(text="", token_ids=tuple(packed.tokens_N[start : start + length].tolist()), images=own)
        for start, length, own in bounds
    ]


def batch(path: str) -> ExampleBatch:
    """Two replies to a prompt with two images, one to a prompt with one, and three to texts."""
    codec = codec_of(processor(path))
    pictured, wide = ask(codec, "Is ", RED, " like ", WIDE, "?"), ask(codec, WIDE, "and?")
    texts = [ask(codec, text) for text in ("2 plus 2?", "What is it, then, if not what it was?", "3?")]
    sequences = [
        WeightedTokens(
            token_ids_T=torch.tensor([*prompt.token_ids, *reply]),
            weights_T=torch.tensor([0.0] * len(prompt.token_ids) + [0.1] * len(reply)),
            prompt_length=len(prompt.token_ids),
            images=prompt.images,
        )
        for prompt, reply in zip(
            [pictured, pictured, wide, *texts], ([5, 9, 11], [7], [8, 6], [9], [4] * 9, [3]), strict=True
        )
    ]
    groups = [0, 0, 1, 2, 3, 4]
    packed = pack_sequences(sequences, group_ids=groups, sample_ids=[0, 1, 0, 0, 0, 0])
    return evolve(packed, unit_ids_S=torch.arange(len(packed)))
