"""Policy and critic on the tiny model: steps, splits, saving."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.sections.actor import ActorConfig, Checkpointing, DType
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective, PolicyLossObjective
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.errors import CheckpointError, NonFiniteUpdateError
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.entrypoints.composition.models import make_critic
from rollgrad.testing.agent_executor import make_trajectory

SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.01, total_steps=10)
OBJECTIVE = PolicyLossObjective(entropy_coef=0.1)
VALUE_OBJECTIVE = ClippedValueObjective(clip=None)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(str(path), dtype=dtype, device=torch.device("cpu"), flag="--actor.model_name_or_path")


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return load(tiny_model_dir)


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(str(tiny_model_dir), flag="--actor.model_name_or_path")


@pytest.fixture
def batch() -> PackedBatch:
    """Two groups of three, with advantages and weights."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 280, (count,), generator=generator).tolist()

    prompts = [tokens(9), tokens(4)]
    packed = pack(
        [
            make_trajectory(prompts[g], tokens(2 + 3 * i), *([tokens(3), tokens(2)] if i == 1 else []), group_id=g)
            for g in range(2)
            for i in range(3)
        ]
    )
    mask = packed.action_mask_N
    weights = torch.where(mask, 1.0 / mask.sum(), 0.0)
    noise = torch.randn(2, packed.token_count, generator=generator)
    return evolve(
        packed,
        advantages_N=torch.where(mask, noise[0], 0.0),
        returns_N=torch.where(mask, noise[1], 0.0),
        values_N=torch.zeros(packed.token_count),
        loss_weights_N=weights,
        value_weights_N=weights,
    )


def split(batch: PackedBatch, *parts: list[int]) -> list[PackedBatch]:
    return [batch.select(part) for part in parts]


def parameters(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_any_split_gives_the_same_step(tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch) -> None:
    results, updated = [], []
    for parts in ([list(range(6))], [[0, 1], [2, 3, 4], [5]], [[5], [4], [3], [2], [1], [0]]):
        policy = TorchPolicy(load(tiny_model_dir), tokenizer, SETTINGS)
        results.append(policy.update(split(batch, *parts), OBJECTIVE))
        updated.append(parameters(policy.module))
    for metrics, weights in zip(results[1:], updated[1:], strict=True):
        assert metrics == pytest.approx(results[0], rel=1e-4, abs=1e-6)
        for name, weight in weights.items():
            # Adam divides by the root of tiny second moments, which magnifies rounding: compare with the step's size.
            assert (weight - updated[0][name]).abs().max() < 0.02 * SETTINGS.lr, name


def test_a_step_is_plain_transformers_with_torchs_adamw(
    tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch
) -> None:
    from transformers import AutoModelForCausalLM

    policy = TorchPolicy(load(tiny_model_dir), tokenizer, SETTINGS, temperature=0.8)
    result = policy.update(split(batch, [0, 1, 2], [3, 4, 5]), OBJECTIVE)

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    logprobs, entropies = [], []
    for tokens in batch.tokens_N.split(batch.lengths_S.tolist()):
        log_softmax = (plain(tokens[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        logprobs.append(torch.cat([torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), -(log_softmax.exp() * log_softmax).sum(-1)]))
    logprobs_N, entropy_N = torch.cat(logprobs), torch.cat(entropies)
    ratio_N = (logprobs_N - logprobs_N.detach()).exp()
    assert batch.advantages_N is not None
    assert batch.loss_weights_N is not None
    loss = (batch.loss_weights_N * -(ratio_N * batch.advantages_N)).sum()
    loss = loss - 0.1 * (batch.loss_weights_N * entropy_N).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), SETTINGS.max_norm)
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    rest = [p for p in plain.parameters() if p.ndim == 1]
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=SETTINGS.lr,
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
    ).step()

    assert result["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    expected = parameters(plain)
    for name, weight in parameters(policy.module).items():
        assert (weight - expected[name]).abs().mean() < 0.002 * SETTINGS.lr, name


def test_gradient_checkpointing_changes_nothing(tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch) -> None:
    outcomes = []
    for checkpointing in (Checkpointing.OFF, Checkpointing.FULL):
        policy = TorchPolicy(load(tiny_model_dir), tokenizer, SETTINGS, gradient_checkpointing=checkpointing)
        calls: list[int] = []
        layer = policy.module.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        metrics = policy.update(split(batch, [0, 1, 2], [3, 4, 5]), OBJECTIVE)
        outcomes.append((len(calls), metrics, parameters(policy.module)))
        assert not policy.module.training
    (calls_without, plain, weights), (calls_with, checkpointed, same) = outcomes
    assert (calls_without, calls_with) == (2, 4), "activations must have been computed again"
    assert checkpointed == plain
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_gradient_checkpointing_changes_nothing_of_the_critic(
    tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch
) -> None:
    outcomes = []
    for checkpointing in (Checkpointing.OFF, Checkpointing.FULL):
        actor = ActorConfig(
            model_name_or_path=str(tiny_model_dir), gradient_checkpointing=checkpointing, dtype=DType.FLOAT32
        )
        critic = make_critic(actor, CriticConfig(), tokenizer, SETTINGS, MasterOptimizer, seed=0)
        calls: list[int] = []
        layer = critic._module.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        metrics = critic.update(split(batch, [0, 1, 2], [3, 4, 5]), VALUE_OBJECTIVE)
        outcomes.append((len(calls), metrics, critic.values(batch)))
        assert not critic._module.training
    (calls_without, plain, values_N), (calls_with, checkpointed, same_N) = outcomes
    assert (calls_without, calls_with) == (2, 4), "activations must have been computed again"
    assert checkpointed == plain
    assert torch.equal(values_N, same_N)


def test_checkpointing_keeps_dropout_off(tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch) -> None:
    module = load(tiny_model_dir)
    module.config.attention_dropout = 0.5
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy = TorchPolicy(module, tokenizer, SETTINGS, gradient_checkpointing=Checkpointing.FULL)
    expected = TorchPolicy(load(tiny_model_dir), tokenizer, SETTINGS).update([batch], OBJECTIVE)
    assert policy.update([batch], OBJECTIVE) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(
    model: Any, tokenizer: Any, batch: PackedBatch, poison: float
) -> None:
    policy = TorchPolicy(model, tokenizer, SETTINGS)
    before = parameters(model)
    calls: list[int] = []

    def second_is_bad(scores: TokenScores, part: PackedBatch) -> LossOutput:
        calls.append(1)
        output = OBJECTIVE(scores, part)
        return output if len(calls) != 2 else LossOutput(loss=output.loss * poison)

    with pytest.raises(NonFiniteUpdateError):
        policy.update(split(batch, [0, 1, 2], [3, 4, 5]), second_is_bad)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


class Agreeing(MasterOptimizer):
    """Counts how often the processes would wait for each other."""

    waits = 0

    def agree(self, well: bool) -> bool:
        self.waits += 1
        return super().agree(well)


def test_processes_agree_as_often_whatever_a_step_is_divided_into(
    tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch
) -> None:
    policy = TorchPolicy(load(tiny_model_dir), tokenizer, SETTINGS, optimize=Agreeing)
    waits = []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2], [3, 4], [5]]):
        before = policy._trained.waits  # type: ignore[attr-defined]
        policy.update(split(batch, *parts), OBJECTIVE)
        waits.append(policy._trained.waits - before)  # type: ignore[attr-defined]
    assert waits[0] == waits[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_policy_goes_on_as_if_never_stopped(
    tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch, dtype: torch.dtype
) -> None:
    policy = TorchPolicy(load(tiny_model_dir, dtype), tokenizer, SETTINGS)
    policy.update([batch], OBJECTIVE)
    state = copy.deepcopy(policy.state_dict())
    policy.update([batch], OBJECTIVE)

    second = TorchPolicy(load(tiny_model_dir, dtype), tokenizer, SETTINGS)
    second.load_state_dict(state)
    second.update([batch], OBJECTIVE)
    expected = parameters(policy.module)
    assert all(torch.equal(weight, expected[name]) for name, weight in parameters(second.module).items())


def test_tied_embeddings_are_one_weight(model: Any, tokenizer: Any, batch: PackedBatch) -> None:
    policy = TorchPolicy(model, tokenizer, SETTINGS)
    names = [name for name, _ in policy.weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    policy.update([batch], OBJECTIVE)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_saved_policy_loads_with_transformers(
    tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = TorchPolicy(load(tiny_model_dir), tokenizer, SETTINGS)
    policy.update([batch], OBJECTIVE)
    policy.save(tmp_path / "saved")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert ours.config._attn_implementation == "sdpa"
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, policy.module.get_parameter(name))
    tokens = batch.tokens_N[None, : int(batch.lengths_S[0])]
    twin = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    twin.load_state_dict(policy.module.state_dict())
    assert torch.equal(ours(tokens).logits, twin(tokens).logits)
    text = "What is 3 plus 4?"
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("kind", [TorchPolicy, TorchValue])
def test_a_place_that_cannot_be_written_is_an_error(model: Any, tokenizer: Any, kind: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        kind(model, tokenizer, SETTINGS).save(tmp_path / "file" / "model")


def test_values_start_at_zero_and_learn_the_returns(model: Any, tokenizer: Any, batch: PackedBatch) -> None:
    critic = TorchValue(model, tokenizer, OptimizerSettings(lr=5e-3, total_steps=80))
    assert not critic.values(batch).any()
    first = critic.update(split(batch, [0, 1, 2], [3, 4, 5]), VALUE_OBJECTIVE)
    for _ in range(79):
        last = critic.update([batch], VALUE_OBJECTIVE)
    # The first action tokens of a group are predicted from the same prompt but return differently: that part stays.
    assert last["value_loss"] < 0.1 * first["value_loss"]
    values = critic.values(batch)
    assert values.dtype == torch.float32
    assert not values[~batch.action_mask_N].any()


def test_any_split_gives_the_critic_the_same_step(tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch) -> None:
    results = []
    for parts in ([list(range(6))], [[0], [1, 2, 3], [4, 5]]):
        critic = TorchValue(load(tiny_model_dir), tokenizer, SETTINGS)
        critic.update(split(batch, *parts), VALUE_OBJECTIVE)
        critic.update(split(batch, *parts), VALUE_OBJECTIVE)
        results.append(critic.values(batch))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


def test_a_restored_critic_goes_on_as_if_never_stopped(
    tiny_model_dir: Path, tokenizer: Any, batch: PackedBatch
) -> None:
    critic = TorchValue(load(tiny_model_dir), tokenizer, SETTINGS)
    critic.update([batch], VALUE_OBJECTIVE)
    state = copy.deepcopy(critic.state_dict())
    critic.update([batch], VALUE_OBJECTIVE)
    second = TorchValue(load(tiny_model_dir), tokenizer, SETTINGS)
    second.load_state_dict(state)
    second.update([batch], VALUE_OBJECTIVE)
    assert torch.equal(second.values(batch), critic.values(batch))


def test_a_saved_critic_holds_backbone_and_head(model: Any, tokenizer: Any, batch: PackedBatch, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModel

    critic = TorchValue(model, tokenizer, SETTINGS)
    for _ in range(3):
        critic.update([batch], VALUE_OBJECTIVE)
    critic.save(tmp_path / "critic")
    head = load_file(tmp_path / "critic" / "value_head.safetensors")
    backbone = AutoModel.from_pretrained(tmp_path / "critic", dtype=torch.float32).eval()
    length = int(batch.lengths_S[0])
    hidden = backbone(batch.tokens_N[None, :length]).last_hidden_state[0]
    values = (hidden @ head["value_head.weight"].T + head["value_head.bias"])[:, 0]
    mask = batch.action_mask_N[:length]
    torch.testing.assert_close(critic.values(batch)[:length][mask], values[:-1][mask[1:]], rtol=1e-4, atol=1e-5)
