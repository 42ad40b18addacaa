"""Losses and gradients of offline trainers against TRL's own trainers on the same tokens, in float32.

TRL's losses run as they are; what is given to them is a model (its padded batch against our packed one, prompts
shared), or, where a trainer only adds to log-probs and rewards, those. Where both differ on purpose, a test states the
difference.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollgrad.adapters.models.torch.forward import PackedLM, scatter
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.learning.unpaired import UnpairedLearner
from rollgrad.domain.algorithms.losses.distillation import divergence
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.algorithms.losses.reward_model import pairwise_reward_loss
from rollgrad.domain.algorithms.losses.supervised import SupervisedObjective
from rollgrad.domain.algorithms.losses.transport import with_opposites
from rollgrad.domain.algorithms.losses.unpaired import UnpairedObjective
from rollgrad.domain.algorithms.preference_settings import FDivergence, PreferenceSettings
from rollgrad.domain.batches.examples import (
    ExampleBatch,
    mismatched,
    pack_demonstrations,
    pack_labels,
    pack_preferences,
    pack_sequences,
)
from rollgrad.domain.episodes.examples import Demonstration, Label, Preference, WeightedTokens
from rollgrad.domain.episodes.spans import aligned_ends
from rollgrad.domain.ports.models import LossOutput, TokenScores

LOSS, GRADIENT = 1e-5, 1e-4
BETA, SMOOTHING = 0.3, 0.1
PAIRS = 4


def reply(prompt: Tensor, length: int) -> WeightedTokens:
    """Random tokens after `prompt`."""
    tokens_T = torch.cat([prompt, torch.randint(3, 300, (length,))])
    return WeightedTokens(
        token_ids_T=tokens_T,
        weights_T=(torch.arange(len(tokens_T)) >= len(prompt)).float(),
        prompt_length=len(prompt),
    )


@pytest.fixture(scope="module")
def pairs() -> list[Preference]:
    torch.manual_seed(0)
    made = []
    for row in range(PAIRS):
        prompt = torch.randint(3, 300, (3 + 2 * row,))
        made.append(Preference(chosen=reply(prompt, 4 + row), rejected=reply(prompt, 7 - row), row=row))
    return made


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Any:
    """The policy before it has moved away."""
    return load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")


@pytest.fixture(scope="module")
def policy(reference: Any) -> Any:
    moved = copy.deepcopy(reference)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return moved


def ours(
    model: Any,
    batch: ExampleBatch,
    objective: Callable[..., LossOutput],
    metrics: dict[str, float] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """(loss, its gradient at each weight), packed; fills in `metrics`."""
    model.zero_grad()
    columns = [scatter(column_A, batch) for column_A in PackedLM(model, correct=True, collision=True)(batch)]
    names = ("logprobs_N", "entropy_N", "correct_N", "mean_logprobs_N", "collision_N")
    output = objective(TokenScores(**dict(zip(names, columns, strict=True))), batch)
    if metrics is not None:
        metrics |= {name: float(value) for name, value in output.metrics.items()}
    output.loss.backward()
    return float(output.loss.detach()), gradients(model)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def scored(model: Any, pairs: list[Preference]) -> list[Preference]:
    """The pairs with the log-probs of `model`."""
    from attrs import evolve

    with torch.no_grad():
        return [
            evolve(pair, ref_logprobs_A=PackedLM(model)(pack_preferences([evolve(pair, weight=1.0)]))[0])
            for pair in pairs
        ]


class OneProcess:
    """Stands in for accelerate."""

    device = torch.device("cpu")
    parallelism_config = None

    def gather(self, values: Tensor) -> Tensor:
        return values

    gather_for_metrics = gather


def padded(sequences: list[WeightedTokens]) -> dict[str, Tensor]:
    """A batch as TRL's collators make it."""
    return {
        "input_ids": pad_sequence([s.token_ids_T for s in sequences], batch_first=True),
        "attention_mask": pad_sequence([torch.ones(len(s)).long() for s in sequences], batch_first=True),
        "completion_mask": pad_sequence([(s.weights_T > 0).long() for s in sequences], batch_first=True),
    }


def trainer(kind: Any, **attributes: Any) -> Any:
    """A trainer of TRL's class `kind` that has nothing but what its loss reads."""
    made: Any = object.__new__(kind)
    common = {
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in (common | attributes).items():
        setattr(made, name, value)
    return made


def unpacked(model: Any, tiny_model_dir: Path) -> Any:
    """Makes a model of transformers with these weights and TRL's head."""
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    add_fused_lm_head(plain, outputs=("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"))
    return plain


def agree(found: tuple[float, dict[str, Tensor]], loss: Tensor, theirs: Any) -> None:
    loss.backward()
    assert max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None) > 1e-3
    assert found[0] == pytest.approx(float(loss.detach()), abs=LOSS, rel=LOSS)
    wanted = gradients(theirs)
    assert wanted.keys() == found[1].keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[1][name], gradient, rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize(
    ("name", "theirs", "smoothing", "divergence"),
    [
        *(("sigmoid", "sigmoid", 0.0, divergence) for divergence in FDivergence),
        ("hinge", "hinge", 0.0, FDivergence.JS),
        ("robust", "robust", SMOOTHING, FDivergence.REVERSE_KL),
        ("ipo", "ipo", 0.0, FDivergence.REVERSE_KL),
        ("hinge", "hinge", 0.0, FDivergence.REVERSE_KL),
        ("sigmoid_norm", "sigmoid_norm", 0.0, FDivergence.REVERSE_KL),
        ("apo_zero", "apo_zero", 0.0, FDivergence.REVERSE_KL),
        ("apo_down", "apo_down", 0.0, FDivergence.REVERSE_KL),
        ("nca_pair", "nca_pair", 0.0, FDivergence.REVERSE_KL),
        ("bco_pair", "bco_pair", 0.0, FDivergence.REVERSE_KL),
        ("exo_pair", "exo_pair", SMOOTHING, FDivergence.REVERSE_KL),
        ("sppo_hard", "sppo_hard", 0.0, FDivergence.REVERSE_KL),
        ("discopop", "discopop", 0.0, FDivergence.REVERSE_KL),
        ("sft", "sft", 0.0, FDivergence.REVERSE_KL),
        ("aot", "aot", 0.0, FDivergence.REVERSE_KL),
        ("aot", "aot", SMOOTHING, FDivergence.REVERSE_KL),
        ("aot_unpaired", "aot_unpaired", 0.0, FDivergence.REVERSE_KL),
        ("aot_unpaired", "aot_unpaired", SMOOTHING, FDivergence.REVERSE_KL),
        ("sigmoid wpo", "sigmoid", 0.0, FDivergence.REVERSE_KL),
        ("bco_pair wpo", "bco_pair", 0.0, FDivergence.REVERSE_KL),
    ],
)
def test_dpo(
    name: str,
    theirs: str,
    smoothing: float,
    divergence: FDivergence,
    pairs: list[Preference],
    policy: Any,
    reference: Any,
    tiny_model_dir: Path,
) -> None:
    from trl import DPOTrainer

    with_reference = scored(reference, pairs)
    name, _, wpo = name.partition(" ")
    settings = PreferenceSettings(
        loss=(name,), beta=BETA, label_smoothing=smoothing, f_divergence=divergence, f_alpha=0.3, wpo=bool(wpo)
    )
    batch, metrics = pack_preferences(with_reference), dict[str, float]()
    with torch.no_grad():
        batch = with_opposites(batch, scatter(PackedLM(policy)(batch)[0], batch), settings)
    found = ours(policy, batch, PreferenceObjective(settings=settings), metrics)
    model = unpacked(policy, tiny_model_dir)
    sums = [torch.split(pair.ref_logprobs_A, [pair.chosen.trained_length, pair.rejected.trained_length])
            for pair in with_reference if pair.ref_logprobs_A is not None]  # fmt: skip
    inputs = padded([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs])
    inputs |= {
        "ref_chosen_logps": torch.stack([chosen.sum() for chosen, _ in sums]),
        "ref_rejected_logps": torch.stack([rejected.sum() for _, rejected in sums]),
    }
    made = trainer(
        DPOTrainer,
        args=SimpleNamespace(discopop_tau=settings.discopop_tau),
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type=str(divergence),
        f_alpha_divergence_coef=0.7,
        loss_types=[theirs],
        loss_weights=[1.0],
        beta=BETA,
        label_smoothing=smoothing,
        use_weighting=bool(wpo),
    )
    agree(found, made._compute_loss(model, inputs, return_outputs=False), model)
    for own, other in (
        ("entropy", "entropy"),
        ("chosen_token_accuracy", "mean_token_accuracy"),
        ("chosen_logprob", "logps/chosen"),
        ("reward_margin", "rewards/margins"),
    ):
        (wanted,) = made._metrics["train"][other]
        assert metrics[own] == pytest.approx(wanted, rel=1e-4), own


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_sft(loss: str, pairs: list[Preference], policy: Any, tiny_model_dir: Path) -> None:
    from trl import SFTTrainer

    sequences = [pair.chosen for pair in pairs]
    demonstrations = [Demonstration(branches=(sequence,), row=0) for sequence in sequences]
    found = ours(policy, pack_demonstrations(demonstrations), SupervisedObjective(loss=loss))
    model = unpacked(policy, tiny_model_dir)
    inputs = padded(sequences)
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    made = trainer(
        SFTTrainer,
        args=SimpleNamespace(loss_type=loss, average_tokens_across_devices=False, prediction_loss_only=False),
        compute_loss_func=None,
        label_smoother=None,
        _is_vlm=False,
    )
    agree(found, made.compute_loss(model, inputs), model)


def test_label_smoothing_is_that_of_transformers(pairs: list[Preference], policy: Any, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.trainer_pt_utils import LabelSmoother

    sequences = [pair.chosen for pair in pairs]
    demonstrations = [Demonstration(branches=(sequence,), row=0) for sequence in sequences]
    found = ours(policy, pack_demonstrations(demonstrations), SupervisedObjective(label_smoothing=SMOOTHING))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model.load_state_dict(policy.state_dict())
    inputs = padded(sequences)
    labels = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    agree(found, LabelSmoother(SMOOTHING)(model(**inputs), labels, shift_labels=True), model)


def leaves(count: int) -> list[Tensor]:
    torch.manual_seed(2)
    return [(-2 * torch.rand(PAIRS) - 0.2).requires_grad_() for _ in range(count)]


def on_log_probs(name: str, beta: float, **more: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(our loss, its gradients) of replies of one token, so that means are sums."""
    one = [
        Preference(
            chosen=WeightedTokens(
                token_ids_T=torch.tensor([1, 2 + row]), weights_T=torch.tensor([0.0, 1.0]), prompt_length=1
            ),
            rejected=WeightedTokens(
                token_ids_T=torch.tensor([1, 50 + row]), weights_T=torch.tensor([0.0, 1.0]), prompt_length=1
            ),
            row=row,
        )
        for row in range(PAIRS)
    ]
    chosen_P, rejected_P = leaves(2)
    zeros_P = torch.zeros(PAIRS)
    logprobs_N = torch.stack([zeros_P, chosen_P, zeros_P, rejected_P], dim=1).view(-1)
    objective = PreferenceObjective(settings=PreferenceSettings(loss=(name,), beta=beta, **more))
    loss = objective(TokenScores(logprobs_N=logprobs_N, entropy_N=logprobs_N), pack_preferences(one)).loss
    return loss, torch.autograd.grad(loss, (chosen_P, rejected_P))


@pytest.mark.parametrize(
    ("name", "theirs", "more"),
    [("simpo", "simpo", {"simpo_gamma": 0.6}), ("cpo", "sigmoid", {"label_smoothing": SMOOTHING})],
)
def test_losses_without_a_reference_are_those_of_cpo(name: str, theirs: str, more: dict[str, float]) -> None:
    from trl.experimental.cpo import CPOTrainer

    loss, gradient = on_log_probs(name, 2.0, **more)
    chosen_P, rejected_P = leaves(2)
    settings = {"alpha": 0.0, "simpo_gamma": 0.0, "label_smoothing": 0.0, **more}
    made = trainer(CPOTrainer, beta=2.0, loss_type=theirs, **settings)
    wanted = made.cpo_loss(chosen_P, rejected_P)[0].mean()
    torch.testing.assert_close(loss, wanted, rtol=LOSS, atol=LOSS)
    for own, other in zip(gradient, torch.autograd.grad(wanted, (chosen_P, rejected_P)), strict=True):
        torch.testing.assert_close(own, other, rtol=GRADIENT, atol=GRADIENT)


def test_orpo_has_the_same_odds_and_the_likelihood_of_the_reply_alone() -> None:
    """TRL adds the likelihood of prompt and chosen reply, the paper and we that of the reply."""
    from trl.experimental.orpo import ORPOTrainer

    loss, gradient = on_log_probs("orpo", BETA)
    chosen_P, rejected_P = leaves(2)
    odds_P = trainer(ORPOTrainer, beta=BETA).odds_ratio_loss(chosen_P, rejected_P)[0]
    theirs = -chosen_P.mean() - odds_P.mean()
    torch.testing.assert_close(loss, theirs, rtol=LOSS, atol=LOSS)
    for own, other in zip(gradient, torch.autograd.grad(theirs, (chosen_P, rejected_P)), strict=True):
        torch.testing.assert_close(own, other, rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type: str, pairs: list[Preference], policy: Any, reference: Any, tiny_model_dir: Path) -> None:
    """A whole optimizer step in one of TRL's batches; completion i - 1 follows prompt i."""
    from attrs import evolve
    from trl import KTOTrainer

    trained, frozen = reference, policy  # so that replies are likelier than under the frozen one, and z is above 0
    replies = [pair.chosen for pair in pairs]
    labels = torch.tensor([True, False, True, True])
    examples = [
        Label(reply=reply, desirable=bool(desirable), row=place, place=place)
        for place, (reply, desirable) in enumerate(zip(replies, labels, strict=True))
    ]
    shifted = mismatched(examples)

    def of_reference(sequences: list[WeightedTokens]) -> list[Tensor]:
        batch = pack_sequences(sequences, group_ids=range(PAIRS), sample_ids=[0] * PAIRS)
        with torch.no_grad():
            logprobs_A = PackedLM(frozen)(batch)[0]
        return list(logprobs_A.split([sequence.trained_length for sequence in sequences]))

    def sums(columns: list[Tensor]) -> Tensor:
        return torch.stack([column_A.sum() for column_A in columns])

    ref_replies, ref_shifted = of_reference(replies), of_reference(shifted)
    examples = [evolve(label, ref_logprobs_A=ref_A) for label, ref_A in zip(examples, ref_replies, strict=True)]
    learner = UnpairedLearner(
        TorchPolicy(copy.deepcopy(trained), None, OptimizerSettings(lr=0.0)),
        objective=UnpairedObjective(loss=loss_type, beta=BETA, desirable_weight=1.2, undesirable_weight=0.8),
        references={(place, (place or PAIRS) - 1): logprob for place, logprob in enumerate(sums(ref_shifted).tolist())},
        max_tokens=20,
    )
    objective = learner.objective_for(examples)
    assert objective.kl > 0
    metrics = dict[str, float]()
    found = ours(trained, pack_labels(examples), objective, metrics)
    model = unpacked(trained, tiny_model_dir)
    made = trainer(
        KTOTrainer,
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        precompute_ref_logps=True,
        beta=BETA,
        desirable_weight=1.2,
        undesirable_weight=0.8,
    )
    inputs = padded(replies) | {f"KL_{name}": column for name, column in padded(shifted).items()}
    inputs |= {
        "label": labels,
        "ref_logps": sums(ref_replies),
        "ref_KL_logps": sums(ref_shifted),
    }
    agree(found, made._compute_loss(model, inputs, return_outputs=False), model)
    for own, other in (
        ("entropy", "entropy"),
        ("desirable_logprob", "logps/chosen"),
        ("undesirable_logprob", "logps/rejected"),
        ("desirable_reward", "rewards/chosen"),
        ("undesirable_reward", "rewards/rejected"),
    ):
        (wanted,) = made._metrics["train"][other]
        assert metrics[own] == pytest.approx(wanted, rel=1e-4), own


@pytest.mark.parametrize("margins", [False, True])
def test_reward_model(margins: bool) -> None:
    from trl import RewardTrainer

    margin_P = torch.rand(PAIRS) if margins else torch.zeros(PAIRS)
    chosen_P, rejected_P = leaves(2)
    loss = pairwise_reward_loss(chosen_P, rejected_P, margins_P=margin_P, centring=0.01).mean()
    gradient = torch.autograd.grad(loss, (chosen_P, rejected_P))
    made = trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=0.01))

    def model(**inputs: Any) -> Any:
        return SimpleNamespace(logits=torch.cat([chosen_P, rejected_P])[:, None])

    inputs = {"attention_mask": torch.ones(1)} | ({"margin": margin_P} if margins else {})
    theirs = made.compute_loss(model, inputs)
    torch.testing.assert_close(loss, theirs, rtol=LOSS, atol=LOSS)
    for own, other in zip(gradient, torch.autograd.grad(theirs, (chosen_P, rejected_P)), strict=True):
        torch.testing.assert_close(own, other, rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_distillation_is_gkd(beta: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(3)
    student, teacher = (torch.randn(6, 40) for _ in range(2))
    leaf, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss = divergence((teacher / 2).log_softmax(1), (leaf / 2).log_softmax(1), beta=beta).mean()
    theirs = GKDTrainer.generalized_jsd_loss(
        other[None], teacher[None], beta=beta, temperature=2.0, num_items_in_batch=6
    )
    torch.testing.assert_close(loss, theirs, rtol=LOSS, atol=LOSS)
    (own,), (wanted,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(theirs, other)
    torch.testing.assert_close(own, wanted, rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_teacher_of_own_replies_is_that_of_trls_command(beta: float) -> None:
    """`trl distillation` compares both at the temperature of sampling, which multiplies no loss."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    torch.manual_seed(4)
    hidden, taught, head, other = (torch.randn(size) for size in ((6, 8), (6, 12), (40, 8), (40, 12)))
    mask = torch.tensor([1, 1, 0, 1, 1, 0])
    leaf, same = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    student, teacher = ((states @ weight.T / 0.7).log_softmax(1) for states, weight in ((leaf, head), (taught, other)))
    loss = divergence(teacher, student, beta=beta)[mask > 0].mean()
    theirs, _, _ = _chunked_divergence_loss(
        same[None], taught[None], head, other, mask[None], beta, num_items_in_batch=4, temperature=0.7
    )
    torch.testing.assert_close(loss, theirs, rtol=LOSS, atol=LOSS)
    (own,), (wanted,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(theirs, same)
    torch.testing.assert_close(own, wanted, rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize("seed", range(20))
def test_spans_and_their_probabilities_are_those_of_gold(seed: int) -> None:
    """Tokens are grouped as in TRL, which multiplies their probabilities, too, where it is told to ("bayesian")."""
    from trl.experimental.gold.gold_trainer import GOLDConfig, ULDLoss

    generator = torch.Generator().manual_seed(seed)
    text = bytes(torch.randint(97, 123, (24,), generator=generator).tolist())

    def cut() -> list[bytes]:
        places = (torch.rand(len(text) - 1, generator=generator) < 0.4).nonzero()[:, 0].add(1).tolist()
        return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]

    tokenised = cut(), cut()
    offsets = [[(0, len(b"".join(pieces[: count + 1]))) for count in range(len(pieces))] for pieces in tokenised]
    groups, others = ULDLoss._align_by_byte_offsets(*offsets)
    assert aligned_ends(*tokenised) == [(a[-1] + 1, b[-1] + 1) for a, b in zip(groups, others, strict=True)]

    tokens = torch.randint(7, (len(tokenised[0]),), generator=generator)
    probabilities = torch.rand(len(tokens), 7, generator=generator).softmax(1)
    loss = ULDLoss(GOLDConfig(uld_token_merge_strategy="bayesian", use_cpu=True, bf16=False, output_dir="unused"))
    merged = loss._merge_probabilities_with_alignment_groups(probabilities, groups, tokens.tolist())
    theirs = torch.stack([merged[number, tokens[group[-1]]] for number, group in enumerate(groups)])
    logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
    ours = torch.stack([logprobs[group[0] : group[-1] + 1].sum() for group in groups])
    assert torch.allclose(ours.exp(), theirs, rtol=1e-5)
