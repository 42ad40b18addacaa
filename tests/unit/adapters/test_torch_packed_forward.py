"""A packed forward pass gives what transformers gives one unpadded sequence at a time, values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.models.torch.forward import PackedLM, scatter
from rollgrad.adapters.models.torch.layers import attention_buckets
from rollgrad.adapters.models.torch.layers.attention import install_attention
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.domain.batches.examples import pack_demonstrations
from rollgrad.domain.batches.packed import PackedBatch, RolloutBatch, pack
from rollgrad.domain.episodes.examples import Demonstration, WeightedTokens
from rollgrad.testing.agent_executor import make_trajectory

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 5


def llama(**extra: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **extra))


def llama_one_key_head() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True))


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=24))


def mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))


def gemma3() -> Any:
    """Windows in every second layer only, a scaling of its own and query norms."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )
    return Gemma3ForCausalLM(config)


def phi() -> Any:
    """A bias on the output layer."""
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**SIZES))


FAMILIES = [llama, llama_one_key_head, qwen2, qwen3, mistral, gemma3, phi]


def built(family: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = family().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at constants, which would hide mistakes
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def random_batch(seed: int = 0) -> PackedBatch:
    """Groups of three, one and two samples with shared prompts; one sample has two turns; a rollout of four branches,
    of which two share a history; lengths from 3 to 60."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    long, short, single, main, turn, helper = (tokens(count) for count in (23, 1, 7, 11, 8, 9))
    return pack(
        [
            make_trajectory(long, tokens(12), group_id=0, sample_id=0),
            make_trajectory(long, tokens(1), group_id=0, sample_id=1),
            make_trajectory(long, tokens(9), tokens(6), tokens(13), group_id=0, sample_id=2),
            make_trajectory(single, tokens(53), group_id=1, sample_id=3),
            make_trajectory(short, tokens(2), group_id=2, sample_id=4),
            make_trajectory(short, tokens(3), tokens(4), tokens(1), group_id=2, sample_id=5),
            make_trajectory(main, tokens(4), group_id=3, sample_id=6),
            make_trajectory(helper, tokens(6), group_id=3, sample_id=6),
            make_trajectory([*main, *turn], tokens(5), group_id=3, sample_id=6),
            make_trajectory([*main, *turn, *tokens(3)], tokens(2), group_id=3, sample_id=6),
        ]
    )


def one_by_one(model: Any, batch: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of every token but the first, from transformers' own SDPA attention, a sequence a call."""
    logprobs, entropies = [], []
    for tokens in batch.tokens_N.split(batch.lengths_S.tolist()):
        logits = model(tokens[None].to(model.device)).logits[0, :-1].float() / temperature
        log_softmax = logits.log_softmax(-1)
        zero = log_softmax.new_zeros(1)
        logprobs.append(torch.cat([zero, log_softmax.gather(1, tokens[1:, None].to(model.device))[:, 0]]))
        entropies.append(torch.cat([zero, -(log_softmax.exp() * log_softmax).sum(-1)]))
    mask = batch.action_mask_N
    return torch.where(mask, torch.cat(logprobs), 0.0), torch.where(mask, torch.cat(entropies), 0.0)


@pytest.fixture(params=["as_is", "one_node_a_call", "one_bucket", "keys_not_folded"])
def bucketing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ways the attention may group the same nodes."""
    if request.param == "one_node_a_call":
        monkeypatch.setattr(attention_buckets, "SMALL_BUCKET", 0)
        monkeypatch.setattr(attention_buckets, "PADDING_TOLERANCE", 0.0)
    if request.param == "one_bucket":
        monkeypatch.setattr(attention_buckets, "SMALL_BUCKET", 1 << 40)
    if request.param == "keys_not_folded":
        monkeypatch.setattr(attention_buckets, "FOLD_LIMIT", 0)
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_values_and_gradients_equal_one_by_one(family: Callable[[], Any], bucketing: str) -> None:
    model, batch = built(family), random_batch()
    generator = torch.Generator().manual_seed(7)
    weight_N, entropy_weight_N = torch.randn(2, batch.token_count, generator=generator)

    expected_logprobs, expected_entropy = one_by_one(model, batch, temperature=0.7)
    (weight_N * expected_logprobs + entropy_weight_N * expected_entropy).sum().backward()
    expected_gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    install_attention(model)
    logprobs_N, entropy_N = (scatter(values_A, batch) for values_A in PackedLM(model, temperature=0.7)(batch))
    torch.testing.assert_close(logprobs_N, expected_logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy_N, expected_entropy, rtol=1e-4, atol=1e-4)

    (weight_N * logprobs_N + entropy_weight_N * entropy_N).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        gap = (gradients[name] - expected).norm() / expected.norm().clamp(min=1e-6)
        # A key's bias shifts all scores of a query alike, so its true gradient is 0: only rounding is left of it.
        assert gap < 1e-4 or expected.norm() < 1e-4, name


@pytest.mark.parametrize("family", [llama, mistral], ids=lambda family: family.__name__)
def test_bfloat16_stays_near_float32(family: Callable[[], Any]) -> None:
    batch = random_batch()
    reference, _ = one_by_one(built(family), batch)
    model = built(family).to(torch.bfloat16)
    theirs, _ = one_by_one(model, batch)
    install_attention(model)
    ours = TorchReference(model).score(batch).logprobs_N
    # Packing may not lose more than the format itself does.
    their_error = (theirs - reference).abs()[batch.action_mask_N]
    our_error = (ours - reference).abs()[batch.action_mask_N]
    assert our_error.mean() <= 1.5 * their_error.mean()
    assert our_error.max() <= 2 * their_error.max()


def test_a_shared_prompt_is_computed_once() -> None:
    model, batch = built(llama), random_batch()
    install_attention(model)
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: seen.append(args[0].numel()))
    TorchReference(model).score(batch)
    shared = 2 * 23 + 1  # the two repeats of the prompt of 23 tokens, the one of the prompt of a single token
    shared += 11 + 19  # the first branch's prompt in the third, the third's in the fourth
    assert seen == [batch.token_count - shared]
    assert len(build_layout(batch).tokens_M) == batch.token_count - shared


def test_order_and_company_change_nothing() -> None:
    model, batch = built(mistral), random_batch()
    install_attention(model)
    reference = TorchReference(model)
    whole = reference.score(batch).logprobs_N
    order = [4, 0, 8, 3, 5, 7, 2, 9, 1, 6]
    shuffled = reference.score(batch.select(order)).logprobs_N
    alone = [reference.score(batch.select([index])).logprobs_N for index in range(len(batch))]
    parts = whole.split(batch.lengths_S.tolist())
    torch.testing.assert_close(torch.cat(alone), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shuffled, torch.cat([parts[index] for index in order]), rtol=1e-4, atol=1e-5)


def test_what_is_no_action_scores_zero() -> None:
    model, batch = built(llama), random_batch()
    install_attention(model)
    scores = TorchReference(model).score(batch)
    assert scores.logprobs_N.dtype == scores.entropy_N.dtype == torch.float32
    assert not scores.logprobs_N[~batch.action_mask_N].any()
    assert not scores.entropy_N[~batch.action_mask_N].any()
    assert (scores.logprobs_N[batch.action_mask_N] < 0).all()


def test_a_window_is_felt() -> None:
    """Guards the tests above: without its window Mistral would give other numbers."""
    batch = random_batch()
    windowed, _ = one_by_one(built(mistral), batch)
    model = built(mistral)
    model.config.sliding_window = None
    unlimited, _ = one_by_one(model, batch)
    assert (windowed - unlimited).abs().max() > 1e-2


def test_updates_on_rollouts_find_no_collision_entropies() -> None:
    """Those of the policy before the update are read; preference pairs are weighed by those of the update itself."""
    model, batch = built(llama), random_batch()
    install_attention(model)
    packed = PackedLM(model, correct=True, mean=False, collision=True)
    assert isinstance(batch, RolloutBatch)
    updated = packed(batch)
    with torch.no_grad():
        *scored, collision_A = packed(batch)
    assert len(updated) == len(scored) == 3
    assert bool((collision_A > 0).all())
    reply = WeightedTokens(
        token_ids_T=torch.tensor([1, 2, 3]), weights_T=torch.tensor([0.0, 0.0, 1.0]), prompt_length=2
    )
    examples = pack_demonstrations([Demonstration(branches=(reply,), row=0)])
    assert len(packed(examples)) == 4
