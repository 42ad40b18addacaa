"""Score centering in a model's own pass, against transformers' logits of one sequence at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.forward import PackedLM, scattered
from rollgrad.adapters.models.torch.heads import chunked_logprobs
from rollgrad.adapters.models.torch.heads.chunked_logprobs import token_logprobs
from rollgrad.adapters.models.torch.layers.attention import install_attention
from rollgrad.adapters.models.torch.models import CENTRED
from rollgrad.application.settings.memory_plan_passes import CENTRED_BYTES
from rollgrad.domain.algorithms.losses.centering import SamplerHead, ScoreCentering
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.algorithms.settings import CorrectionLevel, CorrectionMode, CorrectionSettings
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.episodes.top_logprobs import TopLogprobs
from rollgrad.domain.ports.models import TokenScores
from tests.unit.adapters.test_torch_packed_forward import VOCABULARY, built, llama, random_batch

TEMPERATURE = 0.7
CLIP = CorrectionSettings(level=CorrectionLevel.TOKEN, mode=CorrectionMode.CLIP, low=0.7, high=1.4)


def sampled(top_k: int) -> tuple[RolloutBatch, Tensor]:
    """A batch whose tokens another policy sampled, which told its `top_k` most likely ones, and all of its log-probs at
    each token, float64."""
    batch = random_batch()
    assert isinstance(batch, RolloutBatch)
    generator = torch.Generator().manual_seed(3)
    sampler_NV = (1.5 * torch.randn(batch.token_count, VOCABULARY, generator=generator).double()).log_softmax(1)
    top = sampler_NV.topk(top_k, dim=1)
    mask_N = batch.action_mask_N
    told = TopLogprobs(top.indices.int(), torch.where(mask_N[:, None], top.values.float(), float("nan")))
    return evolve(
        batch,
        rollout_logprobs_N=torch.where(mask_N, sampler_NV.gather(1, batch.tokens_N[:, None])[:, 0].float(), 0.0),
        sampler_ids_NK=told.ids_RK,
        sampler_logprobs_NK=told.logprobs_RK,
        advantages_N=torch.where(mask_N, torch.randn(batch.token_count, generator=generator), 0.0),
        loss_weights_N=torch.where(mask_N, torch.rand(batch.token_count, generator=generator), 0.0),
    ), sampler_NV


def gradients(model: Any, batches: Sequence[RolloutBatch], correction: CorrectionSettings | None) -> dict[str, Tensor]:
    """Gradients of the loss that is the sum of those of the batches."""
    packed = PackedLM(model, temperature=TEMPERATURE, centering=ScoreCentering(correction))
    objective = PolicyLossObjective(loss="policy_gradient", correction=correction, centred=True)
    model.zero_grad()
    for batch in batches:
        scores = TokenScores(**dict(zip(CENTRED, scattered(packed(batch), batch), strict=True)))
        objective(scores, batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], slack: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        gap = (found[name] - wanted).norm() / wanted.norm().clamp(min=1e-6)
        assert gap < slack or wanted.norm() < 1e-5, name


@pytest.mark.parametrize("correction", [None, CLIP], ids=["no weights", "clip"])
def test_gradients_have_the_mean_over_the_whole_vocabulary_taken_out(correction: CorrectionSettings | None) -> None:
    """With all tokens told, to the definition: sum over the vocabulary of mu w grad log pi, a sequence a call."""
    model, (batch, sampler_NV) = built(llama), sampled(VOCABULARY)
    starts = batch.starts_S.tolist()
    for start, tokens in zip(starts, batch.tokens_N.split(batch.lengths_S.tolist()), strict=True):
        own = (model(tokens[None]).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1)
        part = slice(start + 1, start + len(tokens))
        ratio = (own.detach() - sampler_NV[part]).exp()
        weight = torch.ones_like(ratio) if correction is None else ratio.clamp(correction.low, correction.high)
        index = tokens[1:, None]
        score = (weight * own).gather(1, index)[:, 0] - (sampler_NV[part].exp() * weight * own).sum(1)
        (-(batch.filled("loss_weights_N") * batch.filled("advantages_N"))[part] * score).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    install_attention(model)
    assert_close(gradients(model, [batch], correction), expected)


def test_no_split_and_no_order_changes_the_gradient() -> None:
    model, (batch, _) = built(llama), sampled(8)
    install_attention(model)
    whole = gradients(model, [batch], CLIP)
    parts = [batch.select([9, 3, 0]), batch.select([1, 8]), batch.select([2, 7, 6, 4, 5])]
    assert_close(gradients(model, parts, CLIP), whole)


def test_only_what_is_learned_from_is_centred() -> None:
    """Without a gradient, or without the sampler's tokens, a pass has the two columns that it always has."""
    model, (batch, _) = built(llama), sampled(8)
    install_attention(model)
    packed = PackedLM(model, centering=ScoreCentering())
    assert len(packed(batch)) == len(CENTRED)
    with torch.no_grad():
        assert len(packed(batch)) == 2
    unsaid = evolve(batch, sampler_ids_NK=None, sampler_logprobs_NK=None)
    scored = scattered(packed(unsaid), unsaid)
    assert len(scored) == 2
    with pytest.raises(ValueError, match="no mean score"):
        PolicyLossObjective(centred=True)(TokenScores(logprobs_N=scored[0], entropy_N=scored[1]), unsaid)


def test_metrics_say_how_much_the_head_holds_and_how_much_is_taken_out() -> None:
    model, (batch, sampler_NV) = built(llama), sampled(8)
    install_attention(model)
    batch = evolve(batch, loss_weights_N=batch.action_mask_N / batch.action_mask_N.sum())
    packed = PackedLM(model, temperature=TEMPERATURE, centering=ScoreCentering())
    scores = TokenScores(**dict(zip(CENTRED, scattered(packed(batch), batch), strict=True)))
    metrics = PolicyLossObjective(centred=True)(scores, batch).metrics
    mask_N = batch.action_mask_N
    top = sampler_NV.topk(8, dim=1)
    assert float(metrics["centering_sampler_mass"]) == pytest.approx(float(top.values.exp().sum(1)[mask_N].mean()))
    assert 0 < float(metrics["centering_policy_mass"]) < float(metrics["centering_sampler_mass"])
    assert 0 < float(metrics["centering_residual"]) < 2


def test_an_update_holds_of_each_likely_token_what_the_memory_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the 12 bytes of the sampler's ids and log-probs, which come before it."""
    from benchmarks.memory_plan import peak

    tokens, top_k, vocabulary = 512, 64, 128
    monkeypatch.setattr(chunked_logprobs, "CHUNK_BYTES", 4 * vocabulary * 8)
    hidden, weight = (torch.randn(rows, 16).requires_grad_() for rows in (tokens, vocabulary))
    ids = torch.randint(0, vocabulary, (tokens, top_k))
    head = SamplerHead(ids_AK=ids, logprobs_AK=torch.full((tokens, top_k), -5.0))

    def plain() -> None:
        token_logprobs(hidden, weight, None, ids[:, 0], 1.0)[0].sum().backward()

    def centred() -> None:
        logprobs, _, also = token_logprobs(hidden, weight, None, ids[:, 0], 1.0, also_AK=ids)
        (logprobs.sum() + ScoreCentering()(also, head).term_A.sum()).backward()

    plain()  # gradients have their memory then
    held = (peak(centred) - peak(plain)) / (tokens * top_k)
    assert CENTRED_BYTES - 12 - 6 < held < CENTRED_BYTES - 12
