"""Processes that divide the tokens of a batch among them train as one process does, whatever ZeRO divides besides."""

from typing import Any

import pytest
import torch

from rollgrad.adapters.models.ray.sharded import ShardedPolicy, ShardedReference, ShardedValue
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.domain.errors import NonFiniteUpdateError
from tests import tiny_architectures
from tests.fakes import cluster, sequence_parallel
from tests.fakes.cluster import FSDP
from tests.predicted import assert_predicts
from tests.tiny_models import saved, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 2
TOLERANCE = 1e-3
"""Largest difference of a sum of gradients, and of how far a weight has come, as a share of its norm: gradients are
summed in another order, and AdamW, which divides them by their size, makes much of that where they are almost 0."""


EVERYWHERE = pytest.mark.parametrize(
    ("group", "model_dir", "width"),
    [
        pytest.param(2, "Llama", 2, marks=pytest.mark.wide),
        (2, "Mistral", 2),
        (4, "Mistral", 2),
        pytest.param(4, "Qwen3", 4, marks=pytest.mark.wide),
        (4, "nemotron_h", 2),
    ],
    indirect=["group", "model_dir"],
)
AT_ITS_STAGES = pytest.mark.parametrize(
    ("group", "model_dir", "stage", "width"),
    [
        pytest.param(2, "Llama", 3, 2, marks=pytest.mark.wide),
        (2, "Mistral", 2, 2),
        pytest.param(4, "Mistral", 2, 2, marks=pytest.mark.wide),
        (4, "Mistral", 3, 2),
        pytest.param(4, "Llama", 3, 4, marks=pytest.mark.wide),
        pytest.param(4, "Qwen3", FSDP, 4, marks=pytest.mark.wide),
        pytest.param(2, "nemotron_h", 2, 2, marks=pytest.mark.wide),
        pytest.param(2, "qwen3_5_text", 3, 2, marks=pytest.mark.wide),
        (4, "qwen3_5_text", FSDP, 4),
    ],
    indirect=["group", "model_dir"],
)
"""`EVERYWHERE`, with the stage of ZeRO."""


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three key/value heads, of which two or four processes have all, or two, which pairs of them divide; Mistral sees
    a window of five tokens. Others hand states on, in four heads."""
    name = request.param
    if name.islower():
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if name == "qwen3_5_text" else {}
        handing_on = tiny_architectures.tiny_model(name, vocab_size=len(tiny_tokenizer), **heads)
        return str(saved(handing_on, tiny_tokenizer, tmp_path_factory.mktemp("models") / name))
    window = {"sliding_window": 5} if request.param == "Mistral" else {}
    query_heads, key_heads = (4, 2) if request.param == "Qwen3" else (6, 3)
    model = tiny_model(
        f"{request.param}ForCausalLM",
        tiny_tokenizer,
        hidden_size=48,
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        **window,
    )
    return str(saved(model, tiny_tokenizer, tmp_path_factory.mktemp("models") / request.param))


BATCH = sequence_parallel.batch(0, 6)
PARTS = [BATCH.select([0, 1, 3]), BATCH.select([2]), BATCH.select([4, 5])]


def stepped(model: Any, objective: Any) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for _ in range(STEPS):
        metrics = model.update(PARTS, objective)
    return metrics


@AT_ITS_STAGES
def test_a_policy_trains_as_one_process(group: WorkerGroup, stage: int | str, width: int, model_dir: str) -> None:
    group.build(sequence_parallel.rank_policy, model_dir, stage, width)
    policy, lone = ShardedPolicy(group, width=width), cluster.policy(model_dir)
    before = cluster.weights(lone)
    with pytest.raises(NonFiniteUpdateError):  # every process's error, which leaves no trace
        policy.update(PARTS, cluster.steep)
    for objective in (sequence_parallel.by_token, sequence_parallel.by_sequence):
        assert stepped(policy, objective) == pytest.approx(stepped(lone, objective), rel=TOLERANCE, abs=1e-5)
    found, expected = cluster.weights(policy), cluster.weights(lone)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= TOLERANCE * (tensor - before[name]).norm(), name
    moments = policy.state_dict()["moments"]
    for name, wanted in lone.state_dict()["moments"].items():
        gap = (moments[name]["exp_avg"] - wanted["exp_avg"]).norm()
        assert gap <= TOLERANCE * wanted["exp_avg"].norm(), name
    scores, expected_scores = policy.score(BATCH), lone.score(BATCH)
    torch.testing.assert_close(scores.logprobs_N, expected_scores.logprobs_N, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scores.entropy_N, expected_scores.entropy_N, rtol=1e-3, atol=1e-3)


@AT_ITS_STAGES
def test_a_critic_trains_as_one_process(group: WorkerGroup, stage: int | str, width: int, model_dir: str) -> None:
    group.build(sequence_parallel.rank_value, model_dir, stage, width)
    critic, lone = ShardedValue(group, width=width), cluster.value(model_dir)
    found, wanted = (stepped(model, sequence_parallel.of_values) for model in (critic, lone))
    assert found == pytest.approx(wanted, rel=1e-3)
    torch.testing.assert_close(critic.values(BATCH), lone.values(BATCH), rtol=1e-3, atol=1e-4)
    assert critic.values(BATCH).abs().max() > 0.01


@EVERYWHERE
def test_a_reference_scores_what_one_process_scores(group: WorkerGroup, width: int, model_dir: str) -> None:
    group.build(sequence_parallel.rank_reference, model_dir, width)
    reference, lone = ShardedReference(group, width=width), cluster.rank_reference(model_dir)
    for batch in (BATCH, BATCH.select([2])):  # of one sample, a second group has nothing to do
        found, wanted = reference.score(batch), lone.score(batch)
        torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.entropy_N, wanted.entropy_N, rtol=1e-4, atol=1e-4)
        assert_predicts(reference, lone, batch)
