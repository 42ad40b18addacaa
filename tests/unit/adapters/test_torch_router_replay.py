"""Router replay: recorded experts are those that tokens go to, with the routers' own weights of them and gradients."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.experts.router_replay import install_router_replay, router_replay
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.engines.resuming import ContinuingEngine
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.routed import recorded, unrecorded
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.rollout_engine import PauseMode
from tests import tiny_architectures
from tests.fakes import cluster
from tests.tiny_models import saved

FLAG = "--actor.model_name_or_path"
SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.5, 0.9), max_norm=0.0)
PROMPTS = (tuple(range(20, 32)), tuple(range(20, 27)))


def load(path: Path, *, ties: bool = False, shaken: float = 0.0, seed: int = 3) -> Any:
    """The mixture; with `ties` its routers find all experts about equally good, so that what they are `shaken` by
    chooses."""
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(1e-6 if ties else 1.0)
                parameter.add_(shaken * torch.randn(parameter.shape, generator=chance))
            elif "experts" in name:
                parameter.mul_(3.0)  # so that it matters which expert computes
    return model


def policy(model: Any, path: Path, **options: Any) -> TorchPolicy:
    install_router_replay(model, "actor.router_replay is engine")
    return TorchPolicy(model, load_tokenizer(str(path), flag=FLAG), SETTINGS, **options)


def sampler(model: Any, **options: Any) -> EmbeddedEngine:
    replay = install_router_replay(model, "actor.router_replay is engine")
    return EmbeddedEngine(model, eos_token_ids=(), replay=replay, **options)


async def two_turns(engine: Any, prompt: tuple[int, ...], sample: int, *, keep: bool = True) -> Trajectory:
    builder, known = TrajectoryBuilder(prompt, group_id=len(prompt), sample_id=sample), 0
    for turn in range(2):
        params = SamplingParams(max_new_tokens=5 + sample, seed=10 * sample + turn)
        asked = GenerationRequest(prompt_token_ids=builder.token_ids, params=params, keep=keep, known_experts=known)
        reply = await engine.generate(asked)
        known = recorded(reply.routed, known)
        builder.add_action(reply)
        builder.set_reward(1.0)
        if turn == 0:
            builder.add_observation([40, 41, 42])
    return builder.build(stop_reason=StopReason.LENGTH)


async def played(engine: Any, **options: Any) -> RolloutBatch:
    """Three samples of each of two prompts, in two turns."""
    episodes = [two_turns(engine, prompt, sample, **options) for prompt in PROMPTS for sample in range(3)]
    batch = pack(await asyncio.gather(*episodes))
    return evolve(batch, loss_weights_N=batch.action_mask_N / 7)


def gap(scored: Tensor, batch: RolloutBatch) -> float:
    return float((scored - batch.rollout_logprobs_N)[batch.action_mask_N].abs().max())


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
async def test_where_rounding_chooses_the_trainer_has_the_engines_log_probs(tiny_mixture_dir: Path, keep: bool) -> None:
    batch = await played(sampler(load(tiny_mixture_dir, ties=True, shaken=1e-6)), keep=keep)
    trainer = policy(load(tiny_mixture_dir, ties=True, shaken=1e-6, seed=4), tiny_mixture_dir)
    assert batch.experts_NLK is not None
    assert batch.experts_NLK.dtype == torch.uint8
    lacking_N = batch.experts_NLK[:, 0, 0] == unrecorded(batch.experts_NLK)
    last_N = torch.zeros_like(batch.action_mask_N).index_fill(0, batch.lengths_S.cumsum(0) - 1, True)
    assert torch.equal(lacking_N, last_N), "of the last token nobody reads the hidden state"
    assert gap(trainer.score(batch).logprobs_N, batch) < 1e-4
    assert gap(trainer.score(evolve(batch, experts_NLK=None)).logprobs_N, batch) > 0.1, "other experts were chosen"


async def test_a_request_that_goes_on_after_an_abort_says_where_all_its_tokens_went(tiny_mixture_dir: Path) -> None:
    inner = sampler(load(tiny_mixture_dir, ties=True, shaken=1e-6))
    engine = ContinuingEngine(inner)
    heard = asyncio.Event()
    asked = GenerationRequest(prompt_token_ids=PROMPTS[0], params=SamplingParams(max_new_tokens=12, seed=1))
    task = asyncio.create_task(engine.generate(asked, on_token=lambda _: heard.set()))
    await heard.wait()
    await engine.pause(PauseMode.ABORT)
    await engine.resume()
    builder = TrajectoryBuilder(PROMPTS[0], group_id=0, sample_id=0)
    builder.add_action(await task)
    builder.set_reward(1.0)
    batch = pack([builder.build(stop_reason=StopReason.LENGTH)])
    assert batch.experts_NLK is not None
    lacking_N = batch.experts_NLK[:, 0, 0] == unrecorded(batch.experts_NLK)
    assert lacking_N.nonzero().flatten().tolist() == [batch.token_count - 1]
    trainer = policy(load(tiny_mixture_dir, ties=True, shaken=1e-6, seed=4), tiny_mixture_dir)
    assert gap(trainer.score(batch).logprobs_N, batch) < 1e-4


def exact_gradients(path: Path, batch: RolloutBatch) -> dict[str, Tensor]:
    """Gradients of `cluster.likelihood`, by transformers' model in float64, whose routers are written here: a
    softmax over all experts, of which the recorded ones count."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(3.0)
    assert batch.experts_NLK is not None
    assert batch.loss_weights_N is not None
    loss = torch.zeros((), dtype=torch.float64)
    for start, length in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True):
        own = slice(start, start + length)
        for layer, block in enumerate(model.model.layers):

            def route(hidden: Tensor, layer: int = layer, gate: Any = block.mlp.gate, own: slice = own) -> Any:
                logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
                probabilities = logits.softmax(-1)
                recorded = batch.experts_NLK[own, layer].long()  # type: ignore[index]
                chosen = torch.where(recorded == 255, probabilities.topk(2).indices, recorded)
                weights = probabilities.gather(1, chosen)
                if model.config.norm_topk_prob:
                    weights = weights / weights.sum(-1, keepdim=True)
                return logits, weights, chosen

            block.mlp.gate.forward = route
        logits = model(batch.tokens_N[None, own]).logits[0, :-1]
        all_logprobs = functional.log_softmax(logits, -1)
        logprobs = all_logprobs.gather(1, batch.tokens_N[own][1:, None])[:, 0]
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
        loss = loss - (batch.loss_weights_N[own][1:] * (logprobs + 0.1 * entropies)).sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [*Checkpointing])
async def test_gradients_are_those_of_a_float64_reference_in_any_split(
    tiny_mixture_dir: Path, checkpointing: Checkpointing
) -> None:
    batch = await played(sampler(load(tiny_mixture_dir, shaken=1.0)))
    assert batch.experts_NLK is not None
    other = policy(load(tiny_mixture_dir), tiny_mixture_dir, keeps_experts=True)
    own_NLK = other.score(evolve(batch, experts_NLK=None)).experts_NLK
    assert own_NLK is not None
    differ_NLK = own_NLK.sort(-1).values != batch.experts_NLK.sort(-1).values
    assert differ_NLK.float().mean() > 0.2, "the model's own routers choose others"
    expected = exact_gradients(tiny_mixture_dir, batch)
    assert any("gate" in name and float(gradient.abs().max()) > 1e-3 for name, gradient in expected.items())
    for parts in ([[0, 1, 2, 3, 4, 5]], [[3], [0, 4, 5], [1, 2]]):
        mine = policy(load(tiny_mixture_dir), tiny_mixture_dir, gradient_checkpointing=checkpointing)
        mine.update([batch.select(part) for part in parts], cluster.likelihood)
        moments = mine.state_dict()["moments"]
        for name, gradient in expected.items():
            found = moments[f"model.{name}"]["exp_avg"] * 2  # beta is 0.5
            torch.testing.assert_close(found, gradient.float(), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "mixtral", "deepseek_v3", "ernie4_5_moe", "minimax_m2", "gpt_oss", "granitemoe"),
        "longcat_flash",
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("olmoe", "glm4_moe", "dots1", "afmoe", "qwen3_next")),
    ],
)
def test_what_scores_say_of_experts_can_be_replayed(family: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """The trainer's own choices (R2), packed and padded, against routers that have changed since."""
    path = saved(tiny_architectures.tiny_model(family, vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path)
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    mine, batch = policy(model, path, keeps_experts=True), cluster.batch()
    passes = Passes(batch, [[[0, 3]], [[2, 4, 1]]])
    scores = mine.scores(passes)
    logprobs_N, experts_NLK = scores.logprobs_N, scores.experts_NLK
    assert experts_NLK is not None
    assert len(experts_NLK) == batch.token_count
    torch.testing.assert_close(logprobs_N, mine.score(batch).logprobs_N, rtol=0, atol=1e-4)
    routed = evolve(batch, experts_NLK=experts_NLK)
    torch.testing.assert_close(mine.score(routed).logprobs_N, logprobs_N, rtol=0, atol=1e-4)
    others_NLK = (experts_NLK + 1) % 2  # two of the experts, for all tokens
    elsewhere = mine.score(evolve(batch, experts_NLK=others_NLK))
    assert elsewhere.experts_NLK is not None
    replay = router_replay(model)
    assert replay is not None
    layers = [*replay.routers]
    assert torch.equal(elsewhere.experts_NLK[:, layers], others_NLK[:, layers])
    assert (elsewhere.logprobs_N - logprobs_N).abs().max() > 1e-4
    again = mine.scores(passes).experts_NLK
    assert again is not None
    assert torch.equal(again, experts_NLK), "nothing is left of a replay"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "has no routers to experts"),
        ("phimoe", r"chooses experts in another way than by torch\.topk"),
        ("jetmoe", "does not let others choose the experts of its tokens"),
    ],
)
def test_a_model_whose_routers_cannot_replay_is_refused(
    family: str, reason: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    path = saved(tiny_architectures.tiny_model(family, vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path)
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    with pytest.raises(ConfigurationError, match=rf"router_replay is engine, but \w+ ({reason}): leave --actor"):
        install_router_replay(model, "actor.router_replay is engine")
    assert router_replay(model) is None
    assert not any("forward" in vars(part) for name, part in model.named_modules() if name.endswith("mlp"))


def test_the_engine_refuses_a_model_that_it_computes_padded(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_architectures.tiny_model("minimax", vocab_size=len(tiny_tokenizer))
    path = saved(model, tiny_tokenizer, tmp_path)
    with pytest.raises(ConfigurationError, match=r"MiniMax.* padded.*--actor\.router_replay trainer"):
        sampler(load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG))
