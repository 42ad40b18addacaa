"""The chunked divergence from a teacher against plain distributions in float64, values and gradients."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from structlog.testing import capture_logs
from torch import Tensor

from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.heads import chunked_logprobs
from rollgrad.adapters.models.torch.heads.distillation import (
    DistillationSettings,
    KeptTeacher,
    Logits,
    Targets,
    Teacher,
    distilled_logprobs,
    teacher_target,
)
from rollgrad.adapters.models.torch.heads.logits import LogitForm
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.application.settings.memory_plan_passes import DISTILLED_LOGITS, DISTILLED_SLICES
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.testing.agent_executor import make_trajectory
from tests.compiled_layers import fusing_on_a_cpu, graphs

VOCABULARY, HIDDEN, ROWS = 37, 16, 7


CHUNKS = [1, 3, 1000]
"""Rows of a chunk: one, some that divide nothing, all at once."""


@pytest.fixture(params=CHUNKS)
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the rows of a chunk."""
    monkeypatch.setattr(chunked_logprobs, "CHUNK_BYTES", 4 * DISTILLED_SLICES * VOCABULARY * request.param)
    return int(request.param)


def leaves(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul(0.5).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


def taught(logits_AV: Tensor, settings: DistillationSettings) -> Targets:
    return lambda part: teacher_target(logits_AV[part, :VOCABULARY], settings)


def plain(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The divergence of distributions (not of their logarithms), term by term from GKD's definition."""
    if beta in (0.0, 1.0):
        first, second = (p, q) if beta == 0.0 else (q, p)
        return (first * (first / second).log()).sum(1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(1)


def coarse(p: Tensor, ids: Tensor) -> Tensor:
    chosen = p.gather(1, ids)
    return torch.cat([chosen, 1 - chosen.sum(1, keepdim=True)], dim=1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("temperature", "scored"), [(1.0, 1.0), (2.0, 1.0), (0.7, 0.7)])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize(
    ("chunk_rows", "size"),
    [
        *((rows, VOCABULARY + 4) for rows in CHUNKS),
        *((3, size) for size in (VOCABULARY - 4, VOCABULARY)),
        *(
            pytest.param(rows, size, marks=pytest.mark.wide)
            for rows in (1, 1000)
            for size in (VOCABULARY - 4, VOCABULARY)
        ),
    ],
    indirect=["chunk_rows"],
)
def test_values_and_gradients_equal_plain_distributions(
    chunk_rows: int, beta: float, temperature: float, scored: float, top_k: int | None, size: int
) -> None:
    settings = DistillationSettings(beta=beta, temperature=temperature, top_k=top_k)
    hidden, weight, offset, targets = leaves(bias=size == VOCABULARY)
    form = LogitForm(scale=0.7, cap=9.0)
    teacher = torch.randn(ROWS, size, generator=torch.Generator().manual_seed(5)) * 1.5
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    found = distilled_logprobs(hidden, weight, offset, targets, taught(teacher, settings), settings, form, scored)

    raw = torch.nn.functional.linear(hidden.double(), weight.double(), None if offset is None else offset.double())
    logits = 9.0 * torch.tanh(0.7 * raw / 9.0)
    own = (logits / scored).log_softmax(1)
    logprobs, entropy = own.gather(1, targets[:, None])[:, 0], -(own.exp() * own).sum(1)
    scaled = teacher[:, :VOCABULARY].double() / temperature
    if top_k is None:
        p, q = scaled.softmax(1), (logits[:, :size] / temperature).softmax(1)
    else:
        ids = scaled.topk(top_k, dim=1).indices
        p, q = coarse(scaled.softmax(1), ids), coarse((logits / temperature).softmax(1), ids)
    expected = (logprobs, entropy, (logprobs >= own.amax(1)).double(), plain(p, q, beta))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=2e-5)
    pull = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((pull * torch.stack([found[0], found[1], found[3]])).sum(), inputs)
    wanted = torch.autograd.grad((pull.double() * torch.stack([expected[0], expected[1], expected[3]])).sum(), inputs)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-3, atol=1e-4)


CASES: dict[str, tuple[torch.dtype, LogitForm, DistillationSettings, int]] = {
    "reverse": (torch.float32, LogitForm(scale=0.7, cap=9.0), DistillationSettings(beta=1.0), VOCABULARY - 4),
    "between": (
        *(torch.bfloat16, LogitForm(float32=True)),
        *(DistillationSettings(beta=0.3, temperature=2.0), VOCABULARY + 4),
    ),
    "top": (torch.bfloat16, LogitForm(cap=9.0), DistillationSettings(top_k=3), VOCABULARY),
}
"""Format of the weights, formula of the logits, settings of the divergence, and rows of the teacher's head."""


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.wide) for case in ("reverse", "between")), "top"]
)
def test_the_divergence_is_the_same_fused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_logprobs, "CHUNK_BYTES", 4 * DISTILLED_SLICES * VOCABULARY * 4)
    dtype, form, settings, size = CASES[case]
    teacher_AH, teacher_VH = torch.randn(ROWS, HIDDEN).to(dtype), torch.randn(size, HIDDEN).to(dtype)

    def taught(part: slice) -> Logits:
        product = form.product(teacher_AH[part], teacher_VH, None)
        return Logits(product_AV=product[:, :VOCABULARY], form=form)

    def computed() -> list[Tensor]:
        hidden, weight, offset, targets = leaves(bias=True)
        assert offset is not None
        inputs = hidden, weight, offset = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, offset)]
        found = distilled_logprobs(hidden, weight, offset, targets, taught, settings, form)
        pulls = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(2))
        pulled = (pulls * torch.stack([found[0], found[1], found[3]])).sum()
        return [*found, *torch.autograd.grad(pulled, inputs)]

    expected = computed()
    with fusing_on_a_cpu(), capture_logs() as logs:
        found = computed()
        assert graphs() == 2, "of the columns and of the gradient, both whole"
    assert [line for line in logs if line["log_level"] != "info"] == []  # a slow machine tells how long it compiles
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        slack = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(mine, theirs, rtol=slack, atol=slack)


def test_a_slice_of_logits_is_held_as_often_as_the_memory_plan_counts() -> None:
    from benchmarks.memory_plan import peak

    rows, vocabulary = 64, 4096
    form, settings = LogitForm(cap=9.0), DistillationSettings(beta=0.5, temperature=2.0)
    hidden, weight = torch.randn(rows, HIDDEN, requires_grad=True), torch.randn(vocabulary, HIDDEN)
    targets = torch.randint(0, vocabulary, (rows,))

    def taught(part: slice) -> Logits:
        return Logits(product_AV=hidden[part].detach() @ weight.t(), form=form)

    def work() -> None:
        logprobs, entropy, _, apart = distilled_logprobs(hidden, weight, None, targets, taught, settings, form)
        torch.autograd.grad((logprobs + entropy + apart).sum(), hidden)

    work()
    held = peak(work) / (4 * rows * vocabulary)
    assert DISTILLED_LOGITS - 0.1 < held < DISTILLED_LOGITS + 0.1


def test_a_masked_token_gives_no_nan() -> None:
    settings = DistillationSettings(beta=0.5)
    hidden, weight, _, targets = leaves(bias=False)
    logits = torch.randn(ROWS, VOCABULARY)
    logits[:, 3] = -torch.inf
    found = distilled_logprobs(hidden, weight, None, targets, taught(logits, settings), settings, LogitForm())
    assert torch.isfinite(found[3]).all()
    assert torch.isfinite(torch.autograd.grad(found[3].sum(), hidden)[0]).all()


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")


def test_a_model_does_not_diverge_from_itself_and_all_tokens_are_the_vocabulary(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    sequences = [
        WeightedTokens(
            token_ids_T=torch.randint(3, 300, (length,), generator=generator),
            weights_T=(torch.arange(length) >= 3).float(),
            prompt_length=3,
        )
        for length in (5, 9, 4)
    ]
    batch = pack_sequences(sequences, group_ids=range(3), sample_ids=[0] * 3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    size = model.config.vocab_size
    with torch.no_grad():
        for beta in (0.0, 0.5, 1.0):
            whole = DistillationSettings(beta=beta, temperature=2.0)
            itself = PackedLM(model, teacher=Teacher(copy.deepcopy(model), whole))(batch)
            assert itself[3].abs().max() < 1e-6
            columns = [
                PackedLM(model, teacher=Teacher(other, DistillationSettings(beta=beta, temperature=2.0, top_k=k)))(
                    batch
                )
                for k in (None, size, 2 * size, 5)
            ]
            assert columns[0][3].min() > 1e-3
            for all_tokens in columns[1:3]:
                torch.testing.assert_close(all_tokens[3], columns[0][3], rtol=1e-3, atol=1e-5)
            assert (columns[3][3] <= columns[0][3] + 1e-6).all(), "a divergence of coarser distributions is smaller"
            assert (columns[3][3] >= -1e-6).all()
            for mine, theirs in zip(columns[0][:3], PackedLM(model, correct=True)(batch)[:3], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_what_was_predicted_before_teaches_what_the_teacher_itself_does(model: Any) -> None:
    """Values and gradients, of a teacher with a larger vocabulary, too: its other tokens do not count."""
    generator = torch.Generator().manual_seed(5)
    batch = pack([make_trajectory([3, 4], [5 + i] * (i + 1), [9], [30], group_id=0, sample_id=i) for i in range(3)])
    larger = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in larger.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        size = model.config.vocab_size
        larger.resize_token_embeddings(size + 8, mean_resizing=False)
        larger.get_output_embeddings().weight[size:] = 3 * larger.get_output_embeddings().weight[:8]
    settings = DistillationSettings(beta=0.5, temperature=0.7, top_k=6)
    reference = TorchReference(copy.deepcopy(larger), temperature=0.7, size=size)
    found = reference.predictions(Passes(batch, [[[2]], [[0, 1]]]), 6)
    assert (found.ids_AK < size).all()
    assert TorchReference(larger, temperature=0.7).predict(batch, 40).ids_AK.max() >= size
    predicted = evolve(batch, teacher_ids_NK=found.ids_AK, teacher_logprobs_NK=found.logprobs_AB)
    gradients = []
    for teacher, given in ((Teacher(larger, settings), batch), (KeptTeacher(settings), predicted)):
        student = copy.deepcopy(model)
        columns = PackedLM(student, temperature=0.7, teacher=teacher)(given)
        columns[3].sum().backward()
        gradients.append([columns[3].detach(), *(p.grad for p in student.parameters() if p.grad is not None)])
    assert gradients[0][0].min() > 1e-4
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)


def test_a_policy_is_scored_before_its_teacher_has_predicted(model: Any) -> None:
    batch = pack([make_trajectory([3, 4], [5, 6], group_id=0)])
    taught = PackedLM(model, teacher=KeptTeacher(DistillationSettings(top_k=4)))
    with torch.no_grad():
        torch.testing.assert_close(taught(batch), PackedLM(model)(batch))
    with pytest.raises(ValueError, match="no teacher_ids_NK"):
        taught(batch)


def test_a_teacher_that_is_told_more_is_compared_at_the_same_tokens(model: Any, tiny_model_dir: Path) -> None:
    """Its distributions are those that transformers computes after the other prompt; replies of one prompt share it."""
    generator = torch.Generator().manual_seed(4)

    def drawn(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=generator).tolist()

    prompts, told = [drawn(4), drawn(2)], [tuple(drawn(9)), tuple(drawn(3))]
    replies = [drawn(5), drawn(1), drawn(3)]
    groups = [0, 0, 1]
    batch = pack(
        [
            make_trajectory(prompts[group], reply, group_id=group, sample_id=sample)
            for sample, (group, reply) in enumerate(zip(groups, replies, strict=True))
        ]
    )
    batch = evolve(batch, teacher_prompts_S=tuple(told[group] for group in groups))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        reverse = DistillationSettings(beta=1.0, temperature=0.7)
        taught = PackedLM(model, teacher=Teacher(other, reverse))
        assert len(taught(batch)) == 2, "before its update nobody compares a policy with its teacher"
    found = taught(batch)[3].detach()
    from transformers import LlamaForCausalLM

    plain_model = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
    plain_teacher = copy.deepcopy(plain_model)
    plain_teacher.load_state_dict(other.state_dict())

    def distributions(model: Any, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        return (logits / 0.7).softmax(1)

    expected = torch.cat(
        [
            plain(
                distributions(plain_teacher, told[group], reply), distributions(plain_model, prompts[group], reply), 1.0
            )
            for group, reply in zip(groups, replies, strict=True)
        ]
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
