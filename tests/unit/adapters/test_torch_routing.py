"""The losses of a mixture's routers, against transformers' own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.experts.expert_balance import chosen_experts
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.settings.sections.actor import Checkpointing, LoraConfig
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.sharding import weightless
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import LossOutput, TokenScores
from tests import tiny_architectures
from tests.fakes import cluster
from tests.tiny_models import saved, tiny_model

SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.5, 0.9), max_norm=0.0)
COEF = 0.3


@pytest.fixture(params=["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def mixture(request: pytest.FixtureRequest, tiny_mixture_dir: Path, tiny_tokenizer: Any, tmp_path: Path) -> str:
    if request.param == "Qwen3MoeForCausalLM":
        return str(tiny_mixture_dir)
    return str(saved(tiny_model(request.param, tiny_tokenizer, num_local_experts=4), tiny_tokenizer, tmp_path))


def policy(path: str, coef: float = COEF, **options: Any) -> TorchPolicy:
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag="--actor.model_name_or_path")
    tokenizer = load_tokenizer(path, flag="--actor.model_name_or_path")
    return TorchPolicy(model, tokenizer, SETTINGS, aux_loss_coef=coef, **options)


def nothing(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """So that the load-balancing loss is all there is."""
    return LossOutput(loss=0 * scores.logprobs_N.sum())


def transformers_loss(model: Any, batch: PackedBatch) -> Tensor:
    """On the batch with padding, before every sample's tokens and behind them."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    longest = int(batch.lengths_S.max())
    tokens, mask = torch.zeros(2, len(batch), longest, dtype=torch.int64)
    for row, (start, length) in enumerate(zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True)):
        tokens[row, :length] = batch.tokens_N[start : start + length]
        mask[row, :length] = 1
    logits = model.base_model(input_ids=tokens, attention_mask=mask, output_router_logits=True).router_logits
    loss = load_balancing_loss_func(logits, logits[0].shape[-1], model.config.num_experts_per_tok, mask)
    assert isinstance(loss, Tensor)
    return loss


def transformers_z_loss(model: Any, batch: PackedBatch) -> Tensor:
    """Takes the routers' logits of each sample alone; each layer is a group of tokens."""
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    samples = [
        torch.stack([layer.flatten(0, -2) for layer in model.base_model(tokens_T[None], output_router_logits=True)[-1]])
        for tokens_T in batch.tokens_N.split(batch.lengths_S.tolist())
    ]
    loss = router_z_loss_func(torch.cat(samples, dim=1))
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize(
    ("name", "loss_of", "coefs"),
    [("aux_loss", transformers_loss, {}), ("router_z_loss", transformers_z_loss, {"router_z_loss_coef": COEF})],
    ids=["balance", "z"],
)
def test_loss_and_gradient_are_transformers_in_any_split(
    mixture: str, name: str, loss_of: Callable[[Any, PackedBatch], Tensor], coefs: dict[str, float]
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(mixture)
    batch = cluster.batch()
    expected = loss_of(theirs, batch)
    expected.backward()
    unlike = loss_of(theirs, batch.select([0]))
    assert abs(float((unlike - expected).detach())) > 1e-4, "samples must differ, or any mean would do"
    for parts in ([[0, 1, 2, 3, 4]], [[3], [0, 4], [1, 2]], [[0], [1], [2], [3], [4]]):
        mine = policy(mixture, 0.0 if coefs else COEF, **coefs)
        result = mine.update([batch.select(part) for part in parts], nothing)
        assert {"aux_loss", "router_z_loss"} & result.keys() == {name}
        assert result[name] == pytest.approx(float(expected.detach()), rel=1e-5)
        assert result["loss"] == pytest.approx(COEF * float(expected.detach()), rel=1e-5)
        moments = mine.state_dict()["moments"]
        for path, parameter in theirs.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(moments[f"model.{path}"]["exp_avg"], 0.5 * COEF * wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "deepseek_v3", "ernie4_5_moe", "afmoe"),
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("glm4_moe", "dots1", "minimax_m2")),
    ],
)
def test_the_experts_that_were_chosen_are_counted(family: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Some routers choose by the logits plus a correction."""
    model = tiny_architectures.tiny_model(family, vocab_size=len(tiny_tokenizer))
    path = str(saved(model, tiny_tokenizer, tmp_path))
    batch = cluster.batch()
    if "router_logits" not in model.base_model._can_record_outputs:  # transformers 5.17 shows those of few
        with pytest.raises(ConfigurationError, match="does not show its routers to experts in transformers"):
            policy(path)
        return
    mine = policy(path)
    tokens_E, probabilities_E, _ = mine._trained(batch, True)[2:]

    theirs = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    theirs.set_attn_implementation("eager")
    experts = [part for name, part in theirs.named_modules() if name.rpartition(".")[2] == "experts"]
    expected_E, expected_probabilities_E = torch.zeros_like(tokens_E), torch.zeros_like(tokens_E)

    def count(module: Any, inputs: Any, output: Any) -> None:
        expected_E.add_(torch.bincount(inputs[1].flatten(), minlength=len(tokens_E)))

    for part in experts:
        part.register_forward_hook(count)
    for start, length in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True):
        row = batch.tokens_N[None, start : start + length]
        with torch.no_grad():
            for logits in theirs.base_model(input_ids=row, output_router_logits=True).router_logits:
                expected_probabilities_E += logits.reshape(length, -1).softmax(-1).sum(0)
    assert experts
    assert torch.equal(tokens_E, expected_E)
    torch.testing.assert_close(probabilities_E, expected_probabilities_E, rtol=1e-4, atol=1e-4)


def test_routers_that_do_not_show_their_choices_are_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_architectures.tiny_model("jetmoe", vocab_size=len(tiny_tokenizer))
    with pytest.raises(ConfigurationError, match=r"does not show.*--actor\.aux_loss_coef"):
        policy(str(saved(model, tiny_tokenizer, tmp_path)))


def test_they_join_the_objective_under_checkpointing(mixture: str) -> None:
    batch = cluster.batch()
    plain = policy(mixture, 0.0)
    balanced = policy(mixture, gradient_checkpointing=Checkpointing.FULL, router_z_loss_coef=2.0)
    alone, both = plain.update([batch], cluster.likelihood), balanced.update([batch], cluster.likelihood)
    assert both["likelihood"] == pytest.approx(alone["likelihood"], rel=1e-5)
    assert both["loss"] == pytest.approx(alone["loss"] + COEF * both["aux_loss"] + 2 * both["router_z_loss"], rel=1e-5)
    assert not {"aux_loss", "router_z_loss"} & alone.keys()


def test_it_is_the_same_where_scores_say_which_tokens_are_right(mixture: str) -> None:
    """As in supervised fine-tuning: more columns come before those of the routers."""
    plain, with_columns = policy(mixture), policy(mixture, correct=True)
    expected = plain.update([cluster.batch()], cluster.likelihood)
    assert with_columns.update([cluster.batch()], cluster.likelihood) == pytest.approx(expected, rel=1e-6)


def test_samples_that_weigh_nothing_are_not_counted(mixture: str) -> None:
    batch = cluster.batch()
    expected = policy(mixture).update([batch.select([0, 1])], nothing)
    found = policy(mixture).update([batch.select([0, 1]), weightless(batch.select([4]))], nothing)
    assert found == pytest.approx(expected, rel=1e-5)
    all_idle = evolve(batch, loss_weights_N=torch.zeros(batch.token_count))
    assert policy(mixture).update([all_idle], nothing)["aux_loss"] == 0


def test_balance_is_learned(mixture: str) -> None:
    mine, batch = policy(mixture), cluster.batch()
    losses = [mine.update([batch], nothing)["aux_loss"] for _ in range(30)]
    assert losses[-1] < losses[0]
    assert losses[-1] >= mine.module.config.num_experts_per_tok * 0.99


def test_the_z_loss_makes_logits_small(mixture: str) -> None:
    mine, batch = policy(mixture, 0.0, router_z_loss_coef=COEF), cluster.batch()
    losses = [mine.update([batch], nothing)["router_z_loss"] for _ in range(10)]
    assert losses[-1] < losses[0]


def test_a_model_without_experts_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"aux_loss_coef is 0\.3, but LlamaForCausalLM has no routers"):
        policy(str(tiny_model_dir))


@pytest.mark.parametrize("noise", ["dropout", "neftune"])
def test_what_is_counted_before_a_step_is_what_the_step_chooses(tiny_mixture_dir: Path, noise: str) -> None:
    """Dropout of adapters and noise on embeddings change where tokens go."""
    model = load_causal_lm(str(tiny_mixture_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    if noise == "dropout":
        add_lora(model, LoraConfig(rank=4, alpha=64, dropout=0.5), seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    tokenizer = load_tokenizer(str(tiny_mixture_dir), flag="--model")
    alpha = 50.0 if noise == "neftune" else 0.0
    mine = TorchPolicy(model, tokenizer, SETTINGS, aux_loss_coef=COEF, neftune_alpha=alpha)
    batch = cluster.batch()
    with chosen_experts(model) as chosen:
        mine.update([batch], nothing)
    layers = len(chosen) // 2
    before, during = (torch.cat(half) for half in (chosen[:layers], chosen[layers:]))
    assert torch.equal(before, during)
    with chosen_experts(model) as quiet:
        mine.score(batch)
    assert not torch.equal(torch.cat(quiet), during), "the noise must change choices"
