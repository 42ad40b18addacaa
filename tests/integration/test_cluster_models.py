"""Models that are divided over processes by Ray and DeepSpeed or FSDP2 are the model of one process."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from dependency_injector import providers

from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.models.ray.group_state import GroupState
from rollgrad.adapters.models.ray.rank_worker import begin_workers
from rollgrad.adapters.models.ray.replaced_group import ReplacedGroup
from rollgrad.adapters.models.ray.sharded import (
    ShardedPolicy,
    ShardedReference,
    ShardedReward,
    ShardedValue,
    divided_reward,
    reward_copies,
)
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.optimizers.stored_state import opened
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.models.torch.rewards.reward_text import EncodedText
from rollgrad.adapters.ray.placement import Placement
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.adapters.weights.shared_buckets import Assembler, SharedMemory, fill_at, fill_part_at
from rollgrad.application.learning.microbatch import split
from rollgrad.application.pipelines.state_writing import StateWriter
from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.memory_plan import memory_plan
from rollgrad.application.settings.rm import RewardModelConfig, RMRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.algorithms.losses.reward_model import RewardObjective
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import pack_comparisons, pack_preferences
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.episodes.examples import Preference, WeightedTokens
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardInput, RewardRequest
from rollgrad.domain.errors import (
    CheckpointError,
    ConfigurationError,
    ExplodedWeightsError,
    ForeignError,
    NonFiniteUpdateError,
    RewardError,
    UntrainedParameterError,
    WorkerError,
)
from rollgrad.domain.ports.checkpoint_store import STORED_IN, TrainingState
from rollgrad.entrypoints.composition.cluster import rank_model
from rollgrad.entrypoints.composition.offline.rm import rm_container
from rollgrad.testing.agent_executor import make_trajectory
from tests.fakes import cluster
from tests.fakes.cluster import FSDP
from tests.predicted import assert_predicts
from tests.tiny_architectures import tiny_model
from tests.tiny_models import saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
"""Largest difference of a weight after steps of 1e-2: sums are taken in another order, and AdamW divides small
gradients by their size."""

MUON_GAP = {torch.float32: 0.2, torch.bfloat16: 0.6}
"""Largest difference of a step, in its own length: Muon raises what rounding leaves in directions without a gradient.
Parts that were made orthogonal apart would be 1 away."""


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> dict[str, Any]:
    """One process's weights, metrics and state after the steps."""
    policy = cluster.policy(str(tiny_model_dir))
    metrics = cluster.trained(policy)
    scores = policy.score(cluster.batch())
    return {"weights": cluster.weights(policy), "metrics": metrics, "state": policy.state_dict(), "scores": scores}


def assert_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal up to `TOLERANCE`, but for one weight in a thousand: where a gradient is nearly 0, rounding, which differs
    between processors, decides how far Adam steps it."""
    gap = (found - wanted).abs()
    assert float((gap > TOLERANCE).float().mean()) < 1e-3
    assert float(gap.max()) < 10 * TOLERANCE


DIVISIONS = [(0, False), (1, False), (2, False), (2, True), (3, False), (3, True), (FSDP, False), (FSDP, True)]
UNLIKE = (2, True), (3, False), (FSDP, True)
"""Those among them that show of each part what the others do."""


@pytest.mark.parametrize(
    ("group", "stage", "offload"),
    [
        *(pytest.param(2, *each, marks=() if each in UNLIKE else pytest.mark.wide) for each in DIVISIONS),
        pytest.param(1, 3, False, marks=pytest.mark.wide),
    ],
    indirect=["group"],
)
def test_every_division_trains_as_one_process(
    group: WorkerGroup, stage: int | str, offload: bool, expected: dict[str, Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    group.build(cluster.rank_policy, str(tiny_model_dir), stage, offload)
    policy = ShardedPolicy(group)
    batch = cluster.batch()
    rest: Callable[[], None] = (lambda: None) if offload else policy.sleep
    rest()
    before = cluster.weights(policy)
    with pytest.raises(NonFiniteUpdateError):  # the error is every process's, and leaves no trace
        policy.update([batch], cluster.steep)
    with pytest.raises(NonFiniteUpdateError, match=r"The loss is (inf|nan);"):  # one process's, which is told
        policy.update([batch], cluster.broken)
    with pytest.raises(ForeignError, match=r"The loss failed: KeyError: 'advantage' \(cluster\.py, line"):
        policy.update([batch, batch], cluster.failing)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights())

    cluster.trained(policy, 1)
    rest()
    metrics = cluster.trained(policy, cluster.STEPS - 1)
    rest()
    assert metrics == pytest.approx(expected["metrics"], rel=1e-4)
    assert metrics["grad_norm"] > cluster.SETTINGS.max_norm, "the test must clip"
    after = cluster.weights(policy)
    assert after.keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        assert_alike(after[name], tensor)
    scores = policy.score(batch)
    torch.testing.assert_close(scores.logprobs_N, expected["scores"].logprobs_N, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scores.entropy_N, expected["scores"].entropy_N, rtol=1e-3, atol=1e-3)

    state = policy.state_dict()
    for name, moments in expected["state"]["moments"].items():
        torch.testing.assert_close(state["moments"][name], moments, rtol=1e-3, atol=1e-6)
    policy.save(tmp_path / "deep" / "model")
    saved = cluster.weights(cluster.policy(str(tmp_path / "deep" / "model")))
    averages = cluster.weights(cluster.policy(str(tmp_path / "deep" / "model" / "ema")))
    now = cluster.weights(policy)
    for name, tensor in after.items():
        assert torch.equal(saved[name], tensor)
        assert torch.equal(now[name], tensor)
        wanted = expected["state"]["averages"][f"model.{name}"]
        assert_alike(averages[name], wanted)
        assert not torch.allclose(averages[name], tensor, rtol=0, atol=TOLERANCE)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        policy.save(tmp_path / "file" / "model")

    exploded = policy.state_dict().whole()
    exploded["masters"]["model.model.embed_tokens.weight"][-1, 0] = 1e9  # of a token that stands nowhere
    policy.load_state_dict(exploded)
    with pytest.raises(ExplodedWeightsError):  # every process's error, though one has the weight
        cluster.trained(policy, 1)


@pytest.mark.wide
def test_compiled_layers_are_divided_and_train_as_one_process(
    group: WorkerGroup, expected: dict[str, Any], tiny_model_dir: Path
) -> None:
    """By DeepSpeed. Under FSDP2 they do so in tests/integration/test_expert_parallel.py, beside experts."""
    group.build(cluster.rank_compiled, str(tiny_model_dir), 2)
    policy = ShardedPolicy(group)
    assert cluster.trained(policy) == pytest.approx(expected["metrics"], rel=1e-4)
    for name, tensor in cluster.weights(policy).items():
        assert_alike(tensor, expected["weights"][name])
    scores = policy.score(cluster.batch())
    torch.testing.assert_close(scores.logprobs_N, expected["scores"].logprobs_N, rtol=1e-3, atol=1e-3)
    assert min(group.all("graphs")) > 0


@pytest.mark.parametrize("stage", [pytest.param(3, marks=pytest.mark.wide), FSDP])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2_moe"])
def test_processes_hand_states_on_along_paths_of_their_own(
    group: WorkerGroup, model_type: str, stage: int | str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Their forests differ in depth and number of nodes, and a wait for a collective that the other does not make would
    have no end."""
    path = str(saved(tiny_model(model_type, vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path))
    lone = cluster.policy(path)
    group.build(cluster.rank_policy, path, stage)
    policy = ShardedPolicy(group)
    assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=1e-3)
    wanted, found = (torch.cat([w.flatten() for w in cluster.weights(each).values()]) for each in (lone, policy))
    assert_alike(found, wanted)
    replies = [[20] * 9, [20, 21], [20, 20, 22, 23], [20, 20, 22], [24] * 30]
    batch = pack([make_trajectory([5, 6, 7], reply, group_id=i // 4) for i, reply in enumerate(replies)])
    torch.testing.assert_close(policy.score(batch).logprobs_N, lone.score(batch).logprobs_N, rtol=1e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stage", "bytes_a_parameter"), [pytest.param(2, 12, marks=pytest.mark.wide), (3, 16), (FSDP, 8)]
)
def test_an_optimizer_that_sleeps_leaves_its_memory_of_a_gpu(
    ray: None, stage: int | str, bytes_a_parameter: int, tiny_model_dir: Path
) -> None:
    numbers = sum(tensor.numel() for tensor in cluster.policy(str(tiny_model_dir)).module.parameters())
    placement = Placement("actor", 1, gpus=1, timeout=300)
    group = WorkerGroup("actor", begin_workers([placement.slot(0)], threads=1), timeout=300)
    try:
        group.build(cluster.rank_policy_on_gpu, str(tiny_model_dir), stage)
        policy = ShardedPolicy(group)
        cluster.trained(policy, 1)
        [awake] = group.all("allocated")
        state = policy.state_dict().whole()
        policy.sleep()
        [asleep] = group.all("allocated")
        assert awake - asleep >= 0.95 * bytes_a_parameter * numbers
        again = policy.state_dict().whole()
        assert group.all("allocated")[0] < asleep + 0.05 * (awake - asleep), "a state is read where it lies"
        for section in ("masters", "averages"):
            assert all(torch.equal(again[section][name], tensor) for name, tensor in state[section].items())
        cluster.trained(policy, 1)
        assert group.all("allocated")[0] == pytest.approx(awake, rel=0.05)
    finally:
        group.close()
        placement.remove()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.wide), 3, FSDP])
def test_a_weight_that_no_gradient_reaches_ends_the_run(
    group: WorkerGroup, stage: int | str, tiny_model_dir: Path
) -> None:
    group.build(cluster.rank_policy_with_a_spare, str(tiny_model_dir), stage)
    with pytest.raises(UntrainedParameterError, match=r"2 of \d+ .*\(model\.spare\.bias, model\.spare\.weight\)"):
        cluster.trained(ShardedPolicy(group), 1)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.wide), 3, FSDP])
def test_a_state_continues_in_any_division(
    group: WorkerGroup,
    stage: int | str,
    expected: dict[str, Any],
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From one process to several, and back. Written while the model is trained, it is the same to the bit."""
    begun = cluster.policy(str(tiny_model_dir))
    cluster.trained(begun, 1)
    group.build(cluster.rank_policy, str(tiny_model_dir), stage)
    policy = ShardedPolicy(group)
    policy.sleep()  # as optimizers may be when a run continues
    policy.load_state_dict(begun.state_dict())
    cluster.trained(policy, 1)
    store = LocalCheckpointStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(GroupState, "whole")  # its processes write it themselves
        waited_for = LocalCheckpointStore(tmp_path / "waited_for").save_training(training_state(policy))
        writer = StateWriter(store, required=True)
        writer.begin(training_state(policy))
        cluster.trained(policy, 1)
        writer.finish()
    loaded = store.load_training()
    assert loaded is not None
    found, wanted = opened(loaded.state["update"]), opened({STORED_IN: str(waited_for / "update")})
    assert found["steps"] == wanted["steps"] == 2
    for section in ("masters", "averages"):
        assert found[section].keys() == wanted[section].keys()
        assert all(torch.equal(t.whole(), wanted[section][name].whole()) for name, t in found[section].items())
    for name, moments in wanted["moments"].items():
        assert all(torch.equal(found["moments"][name][key].whole(), t.whole()) for key, t in moments.items())
    ended = cluster.policy(str(tiny_model_dir))
    for continued in (ended, policy):
        continued.load_state_dict(loaded.state["update"])
    state, copy = policy.state_dict(), ended.state_dict()
    for section in ("masters", "averages", "moments"):
        for name, tensor in copy[section].items():
            torch.testing.assert_close(state[section][name], tensor, rtol=0, atol=0)
    assert cluster.trained(ended, 1)["lr"] == expected["metrics"]["lr"]
    averages = ended.state_dict()["averages"]
    for name, tensor in ended.weights():
        assert_alike(tensor, expected["weights"][name])
        wanted = expected["state"]["averages"][f"model.{name}"]
        assert_alike(averages[f"model.{name}"], wanted)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, torch.float32), (0, torch.bfloat16), (3, torch.float32), (FSDP, torch.bfloat16)]
)
def test_muon_steps_divided_matrices_as_whole_ones(
    group: WorkerGroup, stage: int | str, dtype: torch.dtype, tiny_model_dir: Path
) -> None:
    """Its second step, after a first one in one process."""
    lone = cluster.policy(str(tiny_model_dir), settings=cluster.MUON_SETTINGS, dtype=dtype)
    cluster.trained(lone, 1)
    group.build(cluster.rank_policy, str(tiny_model_dir), stage, False, cluster.MUON_SETTINGS, dtype)
    policy = ShardedPolicy(group)
    begun = lone.state_dict()
    policy.load_state_dict(begun)
    assert cluster.trained(policy, 1) == pytest.approx(cluster.trained(lone, 1), rel=1e-2)
    found, wanted = policy.state_dict(), lone.state_dict()
    for name, moments in wanted["moments"].items():
        assert (moments.keys() == {"momentum_buffer"}) == ("_proj" in name)
        torch.testing.assert_close(found["moments"][name], moments, rtol=1e-2, atol=1e-3)
    for name, master in wanted["masters"].items():
        gap, step = found["masters"][name] - master, master - begun["masters"][name]
        assert gap.norm() < MUON_GAP[dtype] * step.norm()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.wide), 3, FSDP])
def test_float16_is_scaled_and_skips_steps_as_in_one_process(
    group: WorkerGroup, stage: int | str, tiny_model_dir: Path
) -> None:
    if stage != FSDP:
        with pytest.raises(ConfigurationError, match=r"AVX512-FP16.*--actor\.dtype bfloat16"):
            group.build(cluster.rank_policy_in_float16, str(tiny_model_dir), stage, False)
    group.build(cluster.rank_policy_in_float16, str(tiny_model_dir), stage, True)
    policy, lone = ShardedPolicy(group), cluster.policy(str(tiny_model_dir), dtype=torch.float16)
    with pytest.raises(NonFiniteUpdateError):
        policy.update([cluster.batch()], cluster.broken)
    before = cluster.weights(policy)
    for factor in (2.0**16, 2.0**15):
        metrics = policy.update([cluster.batch(), cluster.batch()], cluster.steep)
        assert metrics["loss_scale"] == factor
        assert metrics["skipped_steps"] == 1.0
        assert "grad_norm" not in metrics
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights())

    state = policy.state_dict()
    assert (state["steps"], state["loss_scale"]) == (0, {"factor": 2.0**14, "well": 0})
    begun = dict(state) | {"loss_scale": {"factor": 2.0**12, "well": 0}}
    for trained in (policy, lone):
        trained.load_state_dict(begun)
    found, wanted = cluster.trained(policy), cluster.trained(lone)
    assert found == pytest.approx(wanted, rel=1e-2)
    assert (wanted["loss_scale"], wanted["skipped_steps"]) == (2.0**12, 0.0)
    assert wanted["grad_norm"] > cluster.SETTINGS.max_norm, "the test must clip"
    state = policy.state_dict()
    assert state["loss_scale"] == lone.state_dict()["loss_scale"] == {"factor": 2.0**12, "well": 3}
    for column in ("masters", "averages"):
        for name, tensor in lone.state_dict()[column].items():
            gap, step = state[column][name] - tensor, tensor - begun["masters"][name]
            assert gap.norm() < 0.05 * step.norm(), name
    assert all(tensor.dtype == torch.float16 for tensor in cluster.weights(policy).values())


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.wide), 3, FSDP])
def test_a_divided_mixture_of_experts_trains_as_one_process(
    group: WorkerGroup, stage: int | str, tiny_mixture_dir: Path
) -> None:
    """Its routers are balanced over the samples of all processes."""
    lone = cluster.policy(str(tiny_mixture_dir), aux_loss_coef=cluster.AUX_LOSS_COEF)
    group.build(cluster.rank_mixture, str(tiny_mixture_dir), stage)
    policy = ShardedPolicy(group)
    found, wanted = cluster.trained(policy), cluster.trained(lone)
    assert found == pytest.approx(wanted, rel=1e-3)
    assert wanted["aux_loss"] > 2  # with two of four experts a token, 2 is balance
    after = cluster.weights(policy)
    for name, tensor in lone.weights():
        assert_alike(after[name], tensor)


@pytest.mark.parametrize("stage", [pytest.param(3, marks=pytest.mark.wide), FSDP])
def test_sinks_are_divided_and_train_as_in_one_process(
    group: WorkerGroup, stage: int | str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """They are parameters of attention, of which the backward pass needs the numbers too."""
    model = tiny_model("granite_swa", vocab_size=len(tiny_tokenizer))
    path = str(saved(model, tiny_tokenizer, tmp_path / "model"))
    lone = cluster.policy(path)
    before = cluster.weights(lone)
    group.build(cluster.rank_policy, path, stage, False)
    policy = ShardedPolicy(group)
    assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=1e-3)
    after = cluster.weights(policy)
    for name, tensor in lone.weights():
        assert_alike(after[name], tensor)
    assert all((after[name] != before[name]).any() for name in before if name.endswith("sinks"))
    assert any(name.endswith("sinks") for name in before)


@pytest.mark.parametrize("stage", [pytest.param(3, marks=pytest.mark.wide), FSDP])
def test_a_divided_mixture_goes_to_the_experts_that_one_process_would(
    group: WorkerGroup, stage: int | str, tiny_mixture_dir: Path
) -> None:
    lone = cluster.replaying(str(tiny_mixture_dir))
    group.build(cluster.rank_replaying, str(tiny_mixture_dir), stage)
    policy = ShardedPolicy(group)
    batch = cluster.batch()
    passes = Passes(batch, [[[0, 1], [4]], [[2], [3]]])
    scores, expected = policy.scores(passes), lone.score(batch)
    experts_NLK = scores.experts_NLK
    assert experts_NLK is not None
    assert expected.experts_NLK is not None
    assert experts_NLK.dtype == torch.uint8
    assert torch.equal(experts_NLK.sort(-1).values, expected.experts_NLK.sort(-1).values)
    torch.testing.assert_close(scores.logprobs_N, expected.logprobs_N, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy_N, expected.entropy_N, rtol=0, atol=1e-5)
    moved = evolve(batch, experts_NLK=(experts_NLK + 1) % 4)
    found, wanted = ([p.update([moved], cluster.likelihood) for _ in range(2)][-1] for p in (policy, lone))
    assert found == pytest.approx(wanted, rel=1e-3)
    after = cluster.weights(policy)
    for name, tensor in lone.weights():
        assert_alike(after[name], tensor)
    other = cluster.replaying(str(tiny_mixture_dir))
    assert other.update([batch], cluster.likelihood)["loss"] != pytest.approx(wanted["loss"], rel=1e-2)


def test_weights_that_nobody_reads_to_the_end_hold_nobody_up(group: WorkerGroup, tiny_model_dir: Path) -> None:
    group.build(cluster.rank_policy, str(tiny_model_dir), 3)
    policy = ShardedPolicy(group)
    memory = SharedMemory(bucket_bytes=4096)
    buckets = policy.sent(fill_at, memory.path, memory.bucket_bytes)
    next(buckets)
    buckets.close()
    memory.unlink()
    assert cluster.trained(policy, 1)["lr"] > 0


@pytest.mark.parametrize(
    ("group", "stage", "offload"),
    [
        *((2, stage, False) for stage in (2, 3, FSDP, 0)),
        *(pytest.param(3, stage, True, marks=pytest.mark.wide if stage == 3 else ()) for stage in (3, FSDP)),
    ],
    indirect=["group"],
)
def test_each_process_sends_the_part_of_the_weights_that_it_has(
    group: WorkerGroup, stage: int | str, offload: bool, tiny_model_dir: Path
) -> None:
    group.build(cluster.rank_policy, str(tiny_model_dir), stage, offload)
    policy = ShardedPolicy(group)
    cluster.trained(policy, 1)
    assert policy.parts() == group.size
    memory = SharedMemory(bucket_bytes=4096)
    assembler = Assembler(torch.device("cpu"))
    arrived: dict[str, torch.Tensor] = {}
    sizes = [0] * group.size
    for messages in policy.sent_parts(fill_part_at, memory.path, memory.bucket_bytes):
        for rank, message in enumerate(messages):
            index, pieces = message or (0, [])
            sizes[rank] += sum(piece["size"] for piece in pieces)
            arrived |= dict(assembler.take(memory.bucket(index), pieces))
    memory.unlink()
    assert assembler.whole()
    expected = cluster.weights(policy)
    assert arrived.keys() == expected.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())
    assert max(sizes) < 1.2 * sum(sizes) / group.size, "each writes its share"


def test_parts_that_nobody_reads_to_the_end_hold_nobody_up(group: WorkerGroup, tiny_model_dir: Path) -> None:
    group.build(cluster.rank_policy, str(tiny_model_dir), 3)
    policy = ShardedPolicy(group)
    memory = SharedMemory(bucket_bytes=4096)
    buckets = policy.sent_parts(fill_part_at, memory.path, memory.bucket_bytes)
    next(buckets)
    buckets.close()
    memory.unlink()
    assert cluster.trained(policy, 1)["lr"] > 0


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.wide), 3, FSDP])
def test_a_divided_critic_trains_as_one_process(
    group: WorkerGroup, stage: int | str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    lone = cluster.value(str(tiny_model_dir))
    group.build(cluster.rank_value, str(tiny_model_dir), stage)
    critic = ShardedValue(group)
    batch = cluster.batch()
    assert cluster.fitted(critic) == pytest.approx(cluster.fitted(lone), rel=1e-4)
    torch.testing.assert_close(critic.values(batch), lone.values(batch), rtol=1e-3, atol=1e-4)
    assert critic.values(batch).abs().max() > 0.01
    critic.save(tmp_path)
    assert (tmp_path / "value_head.safetensors").exists()


def test_a_divided_reward_model_trains_as_one_process(group: WorkerGroup, tiny_model_dir: Path, tmp_path: Path) -> None:
    run = RMRun(actor=RewardModelConfig(model_name_or_path=str(tiny_model_dir), dtype=DType.FLOAT32))
    run.actor.adam.lr, run.ds.zero_stage = 1e-3, 3
    alone = rm_container(run)
    alone.total_steps.override(providers.Object(3))
    lone = alone.local_reward()
    group.build(rank_model, rm_container, "local_reward", run, 3)
    divided = ShardedReward(group)
    pairs = [
        Preference(
            chosen=_reply([5, 6, 7 + row], [8] * (1 + row)),
            rejected=_reply([5, 6, 7 + row], [9, 4]),
            row=row,
            margin=row,
        )
        for row in range(5)
    ]
    batch = pack_comparisons(pairs, margins=True)
    for parts in ([batch], split(batch, 30)):
        found, wanted = (model.update(parts, RewardObjective(centring=0.1)) for model in (divided, lone))
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(divided.values(batch), lone.values(batch), rtol=1e-3, atol=1e-4)
    divided.set_moments((0.25, 2.0))
    divided.save(tmp_path / "model")
    judge = RewardModel.load(
        str(tmp_path / "model"), dtype=torch.float32, device=torch.device("cpu"), flag="model", normalize=True
    )
    last_S = (batch.starts_S + batch.lengths_S - 1).tolist()
    texts = [
        EncodedText(tuple(reply.token_ids_T.tolist()), truncated=False)
        for pair in pairs
        for reply in (pair.chosen, pair.rejected)
    ]
    scores = [(score - 0.25) / 2 for score in lone.values(batch)[last_S].tolist()]
    assert judge.score_encoded(texts) == pytest.approx(scores, rel=1e-3, abs=1e-4)
    lone.load_state_dict(divided.state_dict())  # whole in the first process
    torch.testing.assert_close(divided.values(batch), lone.values(batch), rtol=1e-4, atol=1e-5)


def _reply(prompt: list[int], completion: list[int]) -> WeightedTokens:
    weights_T = torch.tensor([0.0] * len(prompt) + [1.0] * len(completion))
    return WeightedTokens(token_ids_T=torch.tensor(prompt + completion), weights_T=weights_T, prompt_length=len(prompt))


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        pytest.param(0, False, marks=pytest.mark.wide),
        pytest.param(3, False, marks=pytest.mark.wide),
        (3, True),
        (FSDP, True),
    ],
)
def test_a_reference_scores_what_one_process_scores(
    group: WorkerGroup, stage: int | str, offload: bool, tiny_model_dir: Path
) -> None:
    group.build(cluster.rank_reference, str(tiny_model_dir), stage, offload)
    for samples in (1, 5):  # of one sample, a second process has nothing to do
        batch = cluster.batch(samples)
        reference, lone = ShardedReference(group), cluster.rank_reference(str(tiny_model_dir))
        found, wanted = reference.score(batch), lone.score(batch)
        assert_predicts(reference, lone, batch)
        torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.entropy_N, wanted.entropy_N, rtol=1e-4, atol=1e-4)


def test_room_that_is_not_there_is_told(ray: None) -> None:
    with pytest.raises(ConfigurationError, match="found no room for the 99 processes of actor"):
        Placement("actor", 99, gpus=0, timeout=3)


def test_another_call_ends_a_reading_of_weights(group: WorkerGroup, tiny_model_dir: Path) -> None:
    """As when an engine is replaced while models train: its weights are put together in all processes, which would
    otherwise wait for each other in different calls."""
    group.build(cluster.rank_policy, str(tiny_model_dir), 3)
    policy = ShardedPolicy(group)
    memory = SharedMemory(bucket_bytes=4096)
    buckets = policy.sent(fill_at, memory.path, memory.bucket_bytes)
    next(buckets)
    scores = policy.score(cluster.batch())
    with pytest.raises(WorkerError, match="actor was asked for something else while its weights were on their way"):
        next(buckets)
    memory.unlink()
    assert torch.equal(policy.score(cluster.batch()).logprobs_N, scores.logprobs_N)


def send(policy: ShardedPolicy) -> None:
    memory = SharedMemory(bucket_bytes=4096)
    try:
        for _ in policy.sent(fill_at, memory.path, memory.bucket_bytes):
            pass
    finally:
        memory.unlink()


def training_state(policy: ShardedPolicy) -> TrainingState:
    return TrainingState(step=1, state={"run": {}, "update": policy.state_dict(), "before": {}}, description={})


PHASES: dict[str, Callable[[ShardedPolicy, LocalCheckpointStore], object]] = {
    "score": lambda policy, store: policy.score(cluster.batch()),
    "update": lambda policy, store: cluster.trained(policy, 1),
    "push": lambda policy, store: send(policy),
    "save": lambda policy, store: store.save_model(policy, "model"),
    "state": lambda policy, store: store.save_training(training_state(policy)),
}


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("phase", "rank", "doing", "size"),
    [
        ("score", 1, "score", 2),
        ("push", 1, "next_update", 2),
        pytest.param("update", 0, "update", 1, marks=pytest.mark.wide),
        pytest.param("save", 0, "save", 1, marks=pytest.mark.wide),
        ("state", 0, "write_state", 1),
    ],
)
def test_a_process_that_dies_is_named_and_what_was_saved_stays(
    phase: str, rank: int, doing: str, size: int, ray: None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Others may fail before it is known that it died, as they compute together at ZeRO stage 3."""
    store = LocalCheckpointStore(tmp_path)
    with cluster.worker_group(size) as group:
        group.build(cluster.doomed_policy, str(tiny_model_dir), 3)
        policy = ShardedPolicy(group)
        before = cluster.trained(policy, 1)
        saved = cluster.weights(policy)
        store.save_model(policy, "model")
        store.save_training(training_state(policy))
        group.all("doom", rank, phase)
        for _ in range(2):  # whoever asks later is told the same
            with pytest.raises(WorkerError, match=rf"processes of actor, rank {rank} died while '{doing}' was"):
                PHASES[phase](policy, store)
    left = LocalCheckpointStore(tmp_path)
    lone = cluster.policy(str(tmp_path / "model"))
    for name, tensor in lone.weights():
        torch.testing.assert_close(tensor, saved[name], rtol=0, atol=0)
    loaded = left.load_training()
    assert loaded is not None
    lone.load_state_dict(loaded.state["update"])
    assert cluster.trained(lone, 1)["lr"] < before["lr"]


@pytest.mark.chaos
async def test_the_copies_of_a_reward_model_share_the_replies_also_when_one_was_lost(
    ray: None, reward_model_dir: Path
) -> None:
    """All are replaced twice; then every reply is a failed judgement that names the process."""
    requests = [
        RewardRequest(prompt=Prompt(token_ids=(1,), text="What?"), response=" 7" * n, stop_reason=StopReason.STOP)
        for n in (1, 3, 200)
    ]
    wanted = cluster.reward_model(str(reward_model_dir)).judge(
        [RewardInput(text=request.query) for request in requests]
    )
    started: list[WorkerGroup] = []
    placement = Placement("reward", 2, gpus=0, timeout=300)

    def start() -> WorkerGroup:
        slots = [placement.slot(rank) for rank in range(2)]
        started.append(WorkerGroup("reward", begin_workers(slots, threads=1), timeout=300))
        started[-1].build(cluster.reward_model, str(reward_model_dir))
        return started[-1]

    def kill_one() -> None:
        victim = started[-1].pids[1]
        cluster.kill([p for p in cluster.processes("ray::RankWorker") if p.pid == victim])

    group = ReplacedGroup(start, bounds=FleetBounds(max_restarts=2))
    try:
        source = ModelReward(reward_copies(group), timeout=300)
        for _ in range(3):
            rewards = await source.score(requests)
            assert [reward.value for reward in rewards] == pytest.approx([score for score, _ in wanted], abs=1e-5)
            assert [reward.metrics["query_truncated"] for reward in rewards] == [0.0, 0.0, 1.0]
            kill_one()
        for _ in range(2):
            with pytest.raises(RewardError, match="rank 1 died while 'judge' was under way"):
                await source.score(requests)
    finally:
        group.close()
        placement.remove()


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        pytest.param(3, False, marks=pytest.mark.wide),
        (3, True),
        (FSDP, False),
        pytest.param(FSDP, True, marks=pytest.mark.wide),
    ],
)
def test_a_divided_reward_model_scores_as_a_whole_one(
    group: WorkerGroup, stage: int | str, offload: bool, reward_model_dir: Path
) -> None:
    """Also where processes have unlike numbers of passes, or none."""
    group.build(cluster.rank_reward_model, str(reward_model_dir), stage, offload)
    (judge,) = divided_reward(group)
    replies = [RewardInput(text=text) for text in ("7 7 7", "What?", "What is 1 plus 2?", "7", "3 4")]
    wanted = cluster.reward_model(str(reward_model_dir)).judge(replies)
    for some in (replies, replies[2:3]):
        found = judge(some)
        assert [score for score, *_ in found] == pytest.approx(
            [score for reply, (score, _) in zip(replies, wanted, strict=True) if reply in some], abs=1e-5
        )


@pytest.mark.parametrize("stage", [3, FSDP])
def test_a_divided_process_reward_model_judges_as_a_whole_one(
    group: WorkerGroup, stage: int | str, tiny_model_dir: Path
) -> None:
    group.build(cluster.rank_step_model, str(tiny_model_dir), stage, False)
    (judge,) = divided_reward(group)
    texts = [("What?", " 1\n2\n3"), ("What is 1?", " 7"), ("7", " 1\n1\n1\n1\n4"), ("1", "")]
    replies = [RewardInput(text=prompt + reply, reply=reply) for prompt, reply in texts]
    wanted = cluster.step_model(str(tiny_model_dir)).judge(replies)
    lost = RewardInput(text="1", reply="2")
    with pytest.raises(RewardError, match="does not have the reply"):  # the other process has passes to make
        judge([*replies, lost])
    for found, (reward, truncated, steps) in zip(judge(replies), wanted, strict=True):
        assert found[0] == pytest.approx(reward, abs=1e-5)
        assert found[1] is truncated
        assert found[2] == pytest.approx(steps, abs=1e-5)


def test_a_divided_loss_is_that_of_the_whole_batch(group: WorkerGroup, tiny_model_dir: Path) -> None:
    """More micro-batches than samples in some of them: processes without a sample weigh nothing."""
    group.build(cluster.rank_policy, str(tiny_model_dir), 2)
    policy, lone = ShardedPolicy(group), cluster.policy(str(tiny_model_dir))
    batch = cluster.batch()
    parts = [batch.select([index]) for index in range(len(batch))]
    assert policy.update(parts, cluster.likelihood) == pytest.approx(lone.update([batch], cluster.likelihood), rel=1e-4)
    assert all(math.isfinite(float(tensor.sum())) for tensor in cluster.weights(policy).values())


def test_pairs_are_whole_in_every_process(group: WorkerGroup, tiny_model_dir: Path) -> None:
    """Three pairs in two passes: in one of them a process has no pair of its own."""

    def reply(*tokens: int) -> WeightedTokens:
        weights_T = torch.tensor([0.0] + [1.0] * len(tokens))
        return WeightedTokens(token_ids_T=torch.tensor([7, *tokens]), weights_T=weights_T, prompt_length=1)

    group.build(cluster.rank_policy, str(tiny_model_dir), 2)
    policy, lone = ShardedPolicy(group), cluster.policy(str(tiny_model_dir))
    replies = [(reply(3, 4), reply(5)), (reply(9), reply(8, 8, 8)), (reply(1, 2, 3), reply(4, 2))]
    batch = pack_preferences([Preference(chosen=a, rejected=b, row=row) for row, (a, b) in enumerate(replies)])
    objective = PreferenceObjective(settings=PreferenceSettings(loss=("simpo",)))
    passes = split(batch, 12)
    assert [len(part) for part in passes] == [4, 2]
    assert policy.update(passes, objective) == pytest.approx(lone.update([batch], objective), rel=1e-4)
    for name, tensor in cluster.weights(lone).items():
        assert_alike(cluster.weights(policy)[name], tensor)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.wide) for stage in (1, 2, 3)), FSDP])
def test_processes_hold_what_the_memory_plan_says(group: WorkerGroup, stage: int | str, tiny_model_dir: Path) -> None:
    """Up to a tenth of the weights: besides, there are tables of rotations, and numbers that fill up parts."""
    config = RLConfig()
    config.cluster.enable, config.actor.num_gpus_per_node = True, group.size
    if stage == FSDP:
        config.cluster.strategy = Strategy.FSDP2
    else:
        config.ds.zero_stage = int(stage)
    config.train.enable_ema = cluster.SETTINGS.ema_beta is not None
    shape = model_shape("actor.model_name_or_path", str(tiny_model_dir))
    planned = memory_plan(config, shape, compute_bytes=4, machine=Machine(gpu=0, memory=0))[0]
    tolerance = 0.1 * shape.weights(4)
    group.build(cluster.Idle)
    idle = group.all("held")
    group.build(cluster.measured_policy, str(tiny_model_dir), stage)
    policy, batch = ShardedPolicy(group), cluster.batch()
    policy.update([batch], cluster.likelihood)  # which makes moments, and leaves no gradients
    small = shape.weights(4) if stage == 3 else 0  # matrices this small are left whole at the last stage
    for before, after in zip(idle, group.all("held"), strict=True):
        assert after - before == pytest.approx(planned.kept + small, abs=tolerance)
    once, twice = (policy.update([batch] * count, cluster.weighing)["held"] for count in (1, 2))
    # The second of two micro-batches finds the gradients of the first, and else what a single one finds.
    more = 0 if planned.keeps_gradients else planned.gradients
    assert (twice - 2 * once) / group.size == pytest.approx(more, abs=tolerance)
