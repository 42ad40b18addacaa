"""Processes that divide a model's layers among them train as one process does, whatever ZeRO divides besides."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.models.deepspeed.tensor_parallel import divided
from rollgrad.adapters.models.ray.sharded import ShardedPolicy, ShardedReference, ShardedValue
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.domain.errors import ConfigurationError, NonFiniteUpdateError
from tests.fakes import cluster, tensor_parallel
from tests.fakes.grammars import prescribed
from tests.predicted import assert_predicts
from tests.tiny_models import saved, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
"""Largest difference of a log-prob, and of a weight after steps of 1e-2: sums are taken in another order, and AdamW
divides small gradients by their size."""

BFLOAT16_TOLERANCE = 0.3
"""Largest difference of a weight, as a share of how far it has come, besides what rounding does in one process: an
entry of size 1 is rounded to steps of 0.008, and goes 0.02."""

MODELS: dict[str, dict[str, Any]] = {
    # Biases, and three key/value heads, which two processes share unevenly.
    "Qwen2": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": False},
    # Norms of the query and the key, which each process applies to heads of its own; one matrix in and out.
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
}
ONE_PAIR, TWO_PAIRS = 2, 4

everywhere = pytest.mark.parametrize(
    ("group", "model_dir", "stage"),
    [
        pytest.param(ONE_PAIR, "Qwen2", 0, marks=pytest.mark.wide),
        pytest.param(ONE_PAIR, "Qwen3", 3, marks=pytest.mark.wide),
        pytest.param(TWO_PAIRS, "Qwen3", 0, marks=pytest.mark.wide),
        pytest.param(TWO_PAIRS, "Qwen2", 2, marks=pytest.mark.wide),
        (TWO_PAIRS, "Qwen2", 3),
    ],
    indirect=["group", "model_dir"],
    scope="module",  # tests that share processes then follow each other
)
in_two_pairs = pytest.mark.parametrize(
    ("group", "model_dir"),
    [(TWO_PAIRS, "Qwen2"), pytest.param(TWO_PAIRS, "Qwen3", marks=pytest.mark.wide)],
    indirect=True,
)


@pytest.fixture(scope="module")
def group(ray: None, kept_groups: Any, request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    group = kept_groups.group(request.param)
    yield group
    kept_groups.end(group)  # DeepSpeed does not forget how layers were divided


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tiny_model(f"{request.param}ForCausalLM", tiny_tokenizer, **MODELS[request.param])
    return str(saved(model, tiny_tokenizer, tmp_path_factory.mktemp("models") / request.param))


def assert_same_weights(found: Any, expected: Any, tolerance: float) -> None:
    left, right = cluster.weights(found), cluster.weights(expected)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(left[name], tensor, rtol=0, atol=tolerance, msg=name)


@everywhere
def test_a_policy_trains_as_one_process(group: WorkerGroup, stage: int, model_dir: str, tmp_path: Path) -> None:
    group.build(tensor_parallel.rank_policy, model_dir, stage)
    policy, lone = ShardedPolicy(group, width=tensor_parallel.SIZE), cluster.policy(model_dir)
    batch = cluster.batch()
    for breaks in (cluster.steep, cluster.broken):  # the error is every process's, and leaves no trace
        with pytest.raises(NonFiniteUpdateError):
            policy.update([batch], breaks)
    assert_same_weights(policy, lone, 0)
    scores, expected_scores = policy.score(batch), lone.score(batch)
    torch.testing.assert_close(scores.logprobs_N, expected_scores.logprobs_N, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(scores.entropy_N, expected_scores.entropy_N, rtol=0, atol=TOLERANCE)

    metrics = cluster.trained(policy)
    assert metrics == pytest.approx(cluster.trained(lone), rel=1e-4)
    assert metrics["grad_norm"] > cluster.SETTINGS.max_norm, "the test must clip"
    assert_same_weights(policy, lone, TOLERANCE)
    policy.save(tmp_path)
    assert_same_weights(cluster.policy(str(tmp_path)), policy, 0)


@pytest.mark.parametrize(("group", "model_dir"), [(ONE_PAIR, "Qwen2")], indirect=True, scope="module")
def test_no_process_gives_up_sooner_than_its_group(group: WorkerGroup, model_dir: str) -> None:
    """DeepSpeed divides in groups of its own, for which torch has timeouts of its own."""
    group.build(tensor_parallel.rank_policy, model_dir, 3)
    group.build(cluster.idle)
    assert group.all("waits") == [{group.timeout}] * group.size


@everywhere
def test_a_state_continues_in_any_division(group: WorkerGroup, stage: int, model_dir: str) -> None:
    """From one process to several, and back."""
    begun, lone = cluster.policy(model_dir), cluster.policy(model_dir)
    cluster.trained(begun, 1)
    group.build(tensor_parallel.rank_policy, model_dir, stage)
    policy = ShardedPolicy(group, width=tensor_parallel.SIZE)
    policy.load_state_dict(begun.state_dict())
    cluster.trained(policy, 1)
    ended = cluster.policy(model_dir)
    ended.load_state_dict(policy.state_dict())
    assert cluster.trained(ended, 1) == pytest.approx(cluster.trained(lone), rel=1e-4)
    assert_same_weights(ended, lone, TOLERANCE)


@pytest.mark.wide
@pytest.mark.parametrize("stage", [2, 3])
@in_two_pairs
def test_in_bfloat16_too(group: WorkerGroup, stage: int, model_dir: str) -> None:
    lone = cluster.policy(model_dir, dtype=torch.bfloat16)
    before = cluster.weights(lone)
    group.build(tensor_parallel.rank_policy, model_dir, stage, torch.bfloat16)
    policy = ShardedPolicy(group, width=tensor_parallel.SIZE)
    assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=0.05)
    unrounded = cluster.policy(model_dir)
    cluster.trained(unrounded)
    exact, wanted = cluster.weights(unrounded), cluster.weights(lone)
    for name, tensor in policy.weights():
        assert tensor.dtype == torch.bfloat16
        gap, way = (tensor - wanted[name]).float().norm(), (wanted[name] - before[name]).float().norm()
        # A key's bias moves all scores of a query nearly alike: what is left of its gradient is mostly rounding.
        rounding = (wanted[name] - exact[name]).norm()
        assert gap <= BFLOAT16_TOLERANCE * way + rounding, (name, gap / way, rounding / way)


@pytest.mark.parametrize(
    ("group", "model_dir", "stage", "kind"),
    [
        (TWO_PAIRS, "Qwen2", 2, "taught"),
        (TWO_PAIRS, "Qwen3", 2, "judging"),
        pytest.param(TWO_PAIRS, "Qwen2", 3, "following", marks=pytest.mark.wide),
        pytest.param(TWO_PAIRS, "Qwen3", 3, "centred", marks=pytest.mark.wide),
    ],
    indirect=["group", "model_dir"],
)
def test_other_columns_of_the_vocabulary_train_as_one_process(
    group: WorkerGroup, stage: int, model_dir: str, kind: str
) -> None:
    """A policy with a teacher, or with a whole KL divergence from its reference; a process reward model; replies that
    were sampled in a prescribed form; and score centering, of which the processes know some of the tokens each."""
    group.build(tensor_parallel.rank_own_policy, kind, model_dir, stage)
    policy, lone = ShardedPolicy(group, width=tensor_parallel.SIZE), tensor_parallel.POLICIES[kind](model_dir)
    batch, before = prescribed(cluster.batch()) if kind == "following" else cluster.batch(), cluster.weights(lone)
    if kind == "centred":
        batch = tensor_parallel.told(batch, lone.module.config.vocab_size)
    scores, expected = policy.score(batch), lone.score(batch)
    for column in ("logprobs_N", "entropy_N", *(["odds_N"] if kind == "judging" else [])):
        assert getattr(expected, column).abs().max() > 1e-4
        torch.testing.assert_close(getattr(scores, column), getattr(expected, column), rtol=0.01, atol=1e-5)
    for _ in range(2):
        found, wanted = (
            model.update([batch.select([0, 1, 4]), batch.select([2, 3])], tensor_parallel.by_divergence)
            for model in (policy, lone)
        )
        assert found == pytest.approx(wanted, rel=1e-3)
    trained = cluster.weights(policy)
    for name, tensor in cluster.weights(lone).items():  # AdamW makes much of gradients that are almost 0
        assert (trained[name] - tensor).norm() <= 0.01 * (tensor - before[name]).norm(), name


@pytest.mark.parametrize("stage", [2])
@in_two_pairs
def test_a_critic_trains_as_one_process(group: WorkerGroup, stage: int, model_dir: str, tmp_path: Path) -> None:
    group.build(tensor_parallel.rank_value, model_dir, stage)
    critic, lone = ShardedValue(group, width=tensor_parallel.SIZE), cluster.value(model_dir)
    assert cluster.fitted(critic) == pytest.approx(cluster.fitted(lone), rel=1e-4)
    found, wanted = (model.values(cluster.batch()) for model in (critic, lone))
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    critic.save(tmp_path)
    assert (tmp_path / "value_head.safetensors").exists()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, 0.1)])
@in_two_pairs
def test_a_reference_scores_what_one_process_scores(
    group: WorkerGroup, model_dir: str, dtype: torch.dtype, tolerance: float
) -> None:
    group.build(tensor_parallel.rank_reference, model_dir, dtype)
    reference, lone = ShardedReference(group, width=tensor_parallel.SIZE), cluster.policy(model_dir, dtype=dtype)
    for batch in (cluster.batch(), cluster.batch(1)):  # of one sample, the second pair has nothing to do
        found, wanted = reference.score(batch), lone.score(batch)
        torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.entropy_N, wanted.entropy_N, rtol=0, atol=tolerance)
        assert_predicts(reference, lone, batch, tolerance)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": 1},
            "the model has 1 key/value heads",
        ),
        ("GPT2LMHeadModel", {}, "transformers has no plan for it"),
        ("Olmo2ForCausalLM", {}, "in transformers' plan DeepSpeed does not know the style"),
        ("GraniteSWAForCausalLM", {}, "its heads have sinks, which DeepSpeed does not divide"),
        ("Gemma2ForCausalLM", {}, "its embedding does more than look rows up"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    name: str, settings: dict[str, Any], reason: str, tiny_tokenizer: Any
) -> None:
    module = PackedLM(tiny_model(name, tiny_tokenizer, **settings))
    with pytest.raises(ConfigurationError, match=rf"ds\.tensor_parallel_size is 2.*{reason}"):
        divided(module, size=2)
