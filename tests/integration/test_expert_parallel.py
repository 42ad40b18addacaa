"""Processes that divide the experts of a mixture among them train as one process does, whatever FSDP2 divides
besides."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import rollgrad
from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.models.ray.sharded import ShardedPolicy, ShardedReference
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.errors import ConfigurationError
from rollgrad.testing.reward_source import FakeRewardSource
from tests.example_runs import logged
from tests.fakes import cluster, expert_parallel, lora
from tests.fakes.controller import letters
from tests.integration.test_cluster_models import assert_alike, training_state
from tests.tiny_models import saved, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXPERTS = 4
FAMILIES: Mapping[str, dict[str, int]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24},
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 8},
    "Olmoe": {"num_experts": 6},
    "Qwen2Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
}
"""Settings of each: gpt-oss has biases, matrices that are turned, and is computed with padding; of the six experts of
OLMoE two processes that hold the same three have two and one; Qwen 2 adds to what experts return in place."""


@pytest.fixture(scope="module")
def mixtures(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny mixtures of two layers, by family."""
    folder = tmp_path_factory.mktemp("mixtures")
    return {
        family: str(
            saved(
                tiny_model(f"{family}ForCausalLM", tiny_tokenizer, num_experts_per_tok=2, **settings),
                tiny_tokenizer,
                folder / family,
            )
        )
        for family, settings in FAMILIES.items()
    }


def assert_same_state(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for section in ("masters", "averages"):
        assert found[section].keys() == wanted[section].keys()
        for name, tensor in wanted[section].items():
            assert_alike(found[section][name], tensor)
    for name, moments in wanted["moments"].items():
        torch.testing.assert_close(found["moments"][name], moments, rtol=2e-3, atol=1e-6)


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("group", "size", "family", "offload"),
    [
        (2, 2, "Qwen3Moe", False),
        (4, 2, "Mixtral", False),
        pytest.param(4, 2, "Qwen3Moe", True, marks=WIDE),
        pytest.param(4, 4, "Mixtral", False, marks=WIDE),
        pytest.param(4, 2, "GptOss", False, marks=WIDE),
        pytest.param(4, 2, "Olmoe", False, marks=WIDE),
        pytest.param(4, 2, "Qwen2Moe", False, marks=WIDE),
    ],
    indirect=["group"],
)
def test_processes_that_divide_experts_train_as_one(
    group: WorkerGroup, size: int, family: str, offload: bool, mixtures: dict[str, str], tmp_path: Path
) -> None:
    """Routers are balanced over all processes, the norm is clipped; of four processes some have no sample."""
    aux = 0.0 if family == "GptOss" else cluster.AUX_LOSS_COEF
    lone = cluster.policy(mixtures[family], aux_loss_coef=aux)
    group.build(expert_parallel.rank_policy, mixtures[family], size, offload, cluster.SETTINGS, torch.float32, aux)
    policy = ShardedPolicy(group)
    batch = cluster.batch()
    expected, scores = lone.score(batch), policy.score(batch)
    torch.testing.assert_close(scores.logprobs_N, expected.logprobs_N, rtol=1e-5, atol=1e-5)
    found, wanted = cluster.trained(policy), cluster.trained(lone)
    assert found == pytest.approx(wanted, rel=1e-3)
    assert wanted["grad_norm"] > cluster.SETTINGS.max_norm, "the test must clip"
    state = policy.state_dict()
    assert_same_state(state, lone.state_dict())
    sent = cluster.weights(policy)
    for name, tensor in lone.weights():
        assert_alike(sent[name], tensor)
    policy.save(tmp_path)
    for name, tensor in cluster.policy(str(tmp_path)).weights():
        assert torch.equal(sent[name], tensor)


@pytest.mark.parametrize(("group", "size"), [(2, 2), (4, 2), pytest.param(4, 4, marks=WIDE)], indirect=["group"])
def test_each_process_loads_and_keeps_its_own_experts(group: WorkerGroup, size: int, mixtures: dict[str, str]) -> None:
    """Processes of two groups that hold the same experts have a part of them each."""
    whole = dict(cluster.policy(mixtures["Mixtral"]).module.named_parameters())
    group.build(expert_parallel.rank_policy, mixtures["Mixtral"], size)
    held = EXPERTS // group.size
    for rank, own in enumerate(group.all("own_experts")):
        first = (rank % size) * (EXPERTS // size) + (rank // size) * held
        assert len(own) == 4
        for name, rows in own.items():
            assert torch.equal(rows, whole[name][first : first + held])


def test_a_state_continues_whoever_holds_the_experts(
    group: WorkerGroup, mixtures: dict[str, str], tmp_path: Path
) -> None:
    """From one process to two that divide experts, to two that do not, and back to one."""
    path = mixtures["Qwen3Moe"]
    lone = cluster.policy(path)
    state: Any = None
    for number, size in enumerate((1, 2, 1)):
        if number == 0:
            policy: Any = cluster.policy(path)
        else:
            group.build(expert_parallel.rank_policy, path, size)
            policy = ShardedPolicy(group)
            policy.load_state_dict(state)
        cluster.trained(policy, 1)
        cluster.trained(lone, 1)
        store = LocalCheckpointStore(tmp_path / str(number))
        store.save_training(training_state(policy))
        loaded = store.load_training()
        assert loaded is not None
        state = loaded.state["update"]
    last = cluster.policy(path)
    last.load_state_dict(state)
    assert_same_state(last.state_dict(), lone.state_dict())
    assert cluster.trained(last, 1) == pytest.approx(cluster.trained(lone, 1), rel=1e-3)


def test_a_process_whose_experts_get_no_token_waits_for_the_others(
    group: WorkerGroup, mixtures: dict[str, str]
) -> None:
    """All tokens go to the experts of one process, which router replay sees to; activations are computed again. In a
    pass of one sample the other process has no token of its own, either."""
    lone = cluster.replaying(mixtures["Qwen3Moe"])
    group.build(expert_parallel.rank_replaying, mixtures["Qwen3Moe"], 2)
    policy = ShardedPolicy(group)
    batch = cluster.batch()
    scores, expected = policy.scores(Passes(batch, [[[0, 1], [4]], [[2], [3]]])), lone.score(batch)
    experts_NLK = scores.experts_NLK
    assert experts_NLK is not None
    assert expected.experts_NLK is not None
    assert torch.equal(experts_NLK.sort(-1).values, expected.experts_NLK.sort(-1).values)
    torch.testing.assert_close(scores.logprobs_N, expected.logprobs_N, rtol=0, atol=1e-5)
    for first in (0, 2):  # of the two experts of a process
        chosen_K = torch.tensor([first, first + 1], dtype=experts_NLK.dtype)
        sent = evolve(batch, experts_NLK=chosen_K.expand_as(experts_NLK))
        parts = [sent.select([index]) for index in range(len(sent))]
        found, wanted = (model.update(parts, cluster.likelihood) for model in (policy, lone))
        assert found == pytest.approx(wanted, rel=1e-3)
    assert_same_state(policy.state_dict(), lone.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=WIDE)])
def test_16_bits_are_stepped_as_in_one_process(
    group: WorkerGroup, dtype: torch.dtype, mixtures: dict[str, str]
) -> None:
    """With Muon, and in float16 with a scale of the loss."""
    settings = cluster.MUON_SETTINGS
    lone = cluster.policy(mixtures["Mixtral"], settings=settings, dtype=dtype)
    group.build(expert_parallel.rank_policy, mixtures["Mixtral"], 2, False, settings, dtype)
    policy = ShardedPolicy(group)
    begun = lone.state_dict()
    if dtype == torch.float16:
        begun["loss_scale"] = {"factor": 2.0**8, "well": 0}
    for model in (policy, lone):
        model.load_state_dict(begun)
    found, wanted = cluster.trained(policy, 1), cluster.trained(lone, 1)
    assert found == pytest.approx(wanted, rel=2e-2)
    assert wanted.get("skipped_steps", 0.0) == 0.0
    after, expected = policy.state_dict()["masters"], lone.state_dict()["masters"]
    for name, master in expected.items():
        gap, step = after[name] - master, master - begun["masters"][name]
        assert gap.norm() < 0.6 * step.norm(), name


def test_processes_divide_sequences_and_experts(group: WorkerGroup, mixtures: dict[str, str]) -> None:
    lone = cluster.policy(mixtures["Qwen3Moe"])
    group.build(expert_parallel.rank_policy, mixtures["Qwen3Moe"], 2, False, cluster.SETTINGS, torch.float32, 0.0, 2)
    policy = ShardedPolicy(group, width=2)
    assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=1e-3)
    assert_same_state(policy.state_dict(), lone.state_dict())


def test_adapters_train_beside_experts_that_are_divided(group: WorkerGroup, mixtures: dict[str, str]) -> None:
    lone = lora.policy(mixtures["Qwen3Moe"])
    group.build(expert_parallel.rank_adapted, mixtures["Qwen3Moe"], 2)
    policy = ShardedPolicy(group)
    assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=1e-3)
    assert_same_state(policy.state_dict(), lone.state_dict())
    sent = cluster.weights(policy)
    for name, tensor in lone.weights():
        assert_alike(sent[name], tensor)


@pytest.mark.parametrize("mixture", [True, False])
def test_a_reference_scores_what_one_process_scores(
    group: WorkerGroup, mixture: bool, mixtures: dict[str, str], tiny_model_dir: Path
) -> None:
    """Also one without experts, beside an actor that has some."""
    path = mixtures["Mixtral"] if mixture else str(tiny_model_dir)
    group.build(expert_parallel.rank_reference, path, 2)
    for samples in (1, 5):
        batch = cluster.batch(samples)
        found, wanted = ShardedReference(group).score(batch), cluster.rank_reference(path).score(batch)
        torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=1e-4, atol=1e-4)


def test_an_actor_without_experts_is_refused(group: WorkerGroup, tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is 2, but LlamaForCausalLM has no experts: leave"):
        group.build(expert_parallel.rank_policy, str(tiny_model_dir), 2)


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "size", "adapted"), [(cluster.FSDP, 2, False), (cluster.FSDP, 2, True)])
def test_compiled_layers_with_experts_train_as_without_and_compile_nothing_anew(
    group: WorkerGroup, stage: int | str, size: int, adapted: bool, mixtures: dict[str, str]
) -> None:
    """Also of packs of other sizes, and where a process has no sample."""
    path = mixtures["Qwen3Moe"]
    lone = lora.policy(path, lora=lora.WITHOUT_DROPOUT) if adapted else cluster.policy(path)
    group.build(expert_parallel.rank_compiled, path, stage, size, adapted)
    policy = ShardedPolicy(group)

    def assert_same_scores(samples: int) -> None:
        batch = cluster.batch(samples)
        wanted, found = lone.score(batch), policy.score(batch)
        torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=0, atol=1e-5)

    assert_same_scores(5)
    assert cluster.trained(policy, 1) == pytest.approx(cluster.trained(lone, 1), rel=1e-5)
    lone.load_state_dict(policy.state_dict().whole())
    compiled = group.all("graphs")
    assert min(compiled) > 0
    for samples in (1, 2, 3, 7):
        assert_same_scores(samples)
        parts = [cluster.batch(samples)]
        found, wanted = (each.update(parts, cluster.likelihood) for each in (policy, lone))
        assert found == pytest.approx(wanted, rel=1e-4)
    assert group.all("graphs") == compiled


def ppo(path: Path, folder: Path) -> RLConfig:
    """A run of two steps that samples with vLLM, of which each model's two processes divide the experts."""
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"Say {number}"}) for number in range(8)))
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(path), DType.FLOAT32
    config.actor.adam.lr = config.critic.adam.lr = 1e-3
    config.algo.advantage.estimator, config.algo.kl.init_coef = "gae", 0.01
    config.data.prompt_dataset = str(folder / "prompts.jsonl")
    config.rollout.engine = Engine.VLLM
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 2, 2, 8
    config.train.max_steps, config.train.seed, config.ckpt.state_steps = 2, 5, 1
    config.cluster.enable, config.cluster.strategy, config.cluster.timeout = True, Strategy.FSDP2, 300
    config.cluster.expert_parallel_size = config.actor.num_gpus_per_node = 2
    config.ckpt.output_dir, config.logger.console = str(folder / "run"), False
    return config


def steps(config: RLConfig) -> list[dict[str, float]]:
    return [row for row in logged(Path(config.ckpt.output_dir)) if "reward/mean" in row]


@pytest.mark.usefixtures("runs_share_processes")
def test_a_run_with_critic_reference_and_engine_trains_on_what_its_engine_samples(
    tiny_mixture_dir: Path, tmp_path: Path
) -> None:
    config = ppo(tiny_mixture_dir, tmp_path)
    rollgrad.train(config, reward=FakeRewardSource(letters))
    found = steps(config)
    assert len(found) == 2
    assert all(step["policy/mismatch_kl"] < 1e-8 for step in found), "engine and trainer agree on what they sample"
    assert all(step["sync/bytes"] > 0 and step["critic/loss"] > 0 for step in found)
    start, trained = (cluster.policy(str(path)) for path in (tiny_mixture_dir, Path(config.ckpt.output_dir) / "model"))
    for (name, tensor), (_, before) in zip(trained.weights(), start.weights(), strict=True):
        assert not torch.allclose(tensor, before, rtol=0, atol=1e-4), name


@pytest.mark.wide
@pytest.mark.usefixtures("runs_share_processes")
def test_such_a_run_continues_as_if_never_interrupted(tiny_mixture_dir: Path, tmp_path: Path) -> None:
    config, killed = ppo(tiny_mixture_dir, tmp_path), tmp_path / "killed"

    def keep(step: int, *_: object) -> None:
        """Copies what the run would leave if it was killed in its second step."""
        if step == 2:
            shutil.copytree(config.ckpt.output_dir, killed)

    rollgrad.train(config, reward=FakeRewardSource(letters), on_step=keep)
    found = steps(config)
    assert len(found) == 2
    assert [path.name for path in killed.glob("training_state_*")] == ["training_state_1"]
    resumed = ppo(tiny_mixture_dir, tmp_path)
    resumed.ckpt.output_dir, resumed.ckpt.resume = str(killed), Resume.ALWAYS
    rollgrad.train(resumed, reward=FakeRewardSource(letters))
    for one, other in zip(found, steps(resumed), strict=True):
        for key in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/ref_kl", "critic/loss"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7)
    one, other = (cluster.policy(str(Path(each.ckpt.output_dir) / "model")) for each in (config, resumed))
    for (name, tensor), (_, wanted) in zip(other.weights(), one.weights(), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5, msg=name)
