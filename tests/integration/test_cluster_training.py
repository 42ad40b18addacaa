"""Whole runs in several processes: Ray places, vLLM samples, DeepSpeed or FSDP2 trains; and what follows a loss."""

import gzip
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

import rollgrad
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing, DType
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.algorithms.settings import CorrectionLevel, KLEstimator, KLSettings
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import LostProcessError
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.entrypoints.config_io import dump_config
from rollgrad.entrypoints.restarts import until_finished
from rollgrad.testing.reward_source import FakeRewardSource
from tests.accounts import nothing_is_lost
from tests.example_runs import logged, rollouts
from tests.fakes import cluster, controller
from tests.fakes.controller import letters
from tests.fakes.teacher_server import TeacherServer
from tests.integration.test_agent_training import FORM
from tests.scripts import ScriptHost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("ray")]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@pytest.fixture(scope="module")
def make(wide_headed_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RLConfig]:
    tmp_path = tmp_path_factory.mktemp("runs")
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def config(name: str, *, vllm: bool = False) -> RLConfig:
        made = RLConfig()
        made.actor.model_name_or_path, made.actor.dtype = str(wide_headed_model_dir), DType.FLOAT32
        made.actor.adam.lr = 1e-3
        made.algo.advantage.estimator, made.algo.top_entropy_quantile = "group_norm", 0.5
        made.algo.kl = KLSettings(init_coef=0.1, use_loss=True, estimator=KLEstimator.FULL, top_k=8, ref_sync_steps=2)
        made.data.prompt_dataset, made.data.label_key = str(tmp_path / "prompts.jsonl"), "label"
        made.rollout.batch_size, made.rollout.n_samples_per_prompt, made.rollout.max_new_tokens = 2, 4, 12
        made.rollout.engine = Engine.VLLM if vllm else Engine.EMBEDDED
        made.train.max_steps, made.train.seed = STEPS, 5
        made.ckpt.output_dir, made.logger.console = str(tmp_path / name), False
        made.cluster.timeout = 300
        made.cluster.enable, made.actor.num_gpus_per_node = True, 2
        return made

    return config


def train(config: RLConfig, **adapters: Any) -> list[dict[str, float]]:
    """The metrics of each step."""
    rollgrad.train(config, **{"reward": FakeRewardSource(letters)} | adapters)
    return steps(config)


def steps(config: RLConfig) -> list[dict[str, float]]:
    return [row for row in logged(Path(config.ckpt.output_dir)) if "reward/mean" in row]


def model(config: RLConfig) -> dict[str, torch.Tensor]:
    policy = cluster.policy(str(Path(config.ckpt.output_dir) / "model"))
    return {name: tensor.clone() for name, tensor in policy.weights()}


def without_cluster(config: RLConfig) -> RLConfig:
    config.cluster.enable, config.cluster.timeout, config.actor.num_gpus_per_node = False, 1800.0, 1
    return config


def divided(config: RLConfig) -> RLConfig:
    config.ds.zero_stage, config.ckpt.state_steps = 3, 1
    return config


@pytest.fixture(scope="module")
def finished(make: Callable[..., RLConfig]) -> RLConfig:
    """A run in two processes that nothing disturbed."""
    config = divided(make("divided"))
    config.train.profile_steps = 1
    train(config)
    return config


def test_a_run_in_several_processes_is_the_run_in_one(make: Callable[..., RLConfig], finished: RLConfig) -> None:
    lone = without_cluster(make("lone"))
    for one, other in zip(train(lone), steps(finished), strict=True):
        for key in ("reward/mean", "rollout/entropy", "policy/loss", "policy/grad_norm", "policy/ref_kl"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5)
    for name, tensor in model(lone).items():
        torch.testing.assert_close(model(finished)[name], tensor, rtol=0, atol=1e-3)
    for one, other in zip(first_tokens(lone), first_tokens(finished), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4, nan_ok=True)  # entropies travel as float16


def first_tokens(config: RLConfig) -> list[list[float]]:
    """Log-prob, entropy and clipping that the trainer found at each token of the first update; of
    groups that it skipped nothing but the last."""
    names = ("token_trainer_logprob", "token_entropy", "token_clipped")
    kept = rollouts(Path(config.ckpt.output_dir), ("kind", "step", "sample_id", *names))
    first = [row for row in kept if (row["kind"], row["step"]) == ("update", 1)]
    first.sort(key=lambda row: int(row["sample_id"]))
    found = [[math.nan if value is None else value for row in first for value in row[name]] for name in names]
    assert any(value > 0 for value in found[1]), "some groups were learned from"
    return found


def test_the_trace_of_each_process_is_written(finished: RLConfig) -> None:
    (step,) = (Path(finished.ckpt.output_dir) / "profile").iterdir()
    assert traced(step) == {"run", "actor-0", "actor-1"}


def traced(step: Path) -> set[str]:
    """The processes of which there are traces of a step, in each of which something was computed."""
    for path in step.iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert any(event["name"].startswith("aten::") for event in events), path.name
    return {path.name.removesuffix(".json.gz") for path in step.iterdir()}


TRAINERS: dict[str, tuple[type[Any], Callable[[Any], rollgrad.TrainResult], tuple[str, ...]]] = {
    "sft": (rollgrad.SFTRun, rollgrad.train_sft, ()),
    "sft_of_a_mixture": (rollgrad.SFTRun, rollgrad.train_sft, ()),
    "dpo": (rollgrad.DPORun, rollgrad.train_dpo, ("train/reward_margin", "train/accuracy")),
    "dpo_of_three": (rollgrad.DPORun, rollgrad.train_dpo, ("train/reward_margin",)),
    "dpo_streamed": (rollgrad.DPORun, rollgrad.train_dpo, ("train/reward_margin",)),
    "dpo_moving": (rollgrad.DPORun, rollgrad.train_dpo, ("train/reward_margin", "eval/reward_margin")),
    "kto": (rollgrad.KTORun, rollgrad.train_kto, ("train/kl", "train/accuracy", "eval/kl")),
    "kd": (rollgrad.KDRun, rollgrad.train_kd, ("train/divergence", "eval/divergence")),
    "kd_served": (rollgrad.KDRun, rollgrad.train_kd, ("train/divergence", "eval/divergence")),
    "rm": (rollgrad.RMRun, rollgrad.train_rm, ("train/accuracy", "eval/calibration_error", "eval/score_std")),
    "rm_of_three": (rollgrad.RMRun, rollgrad.train_rm, ("train/accuracy", "eval/calibration_error", "eval/score_std")),
    "prm": (rollgrad.PRMRun, rollgrad.train_prm, ("train/step_accuracy", "eval/error_f1")),
}
"""Settings, the function that trains, and metrics of its own."""
SAVING = {"actor.gradient_checkpointing": Checkpointing.FULL, "actor.offload_activations": True}
SELECTIVE = SAVING | {"actor.gradient_checkpointing": Checkpointing.SELECTIVE}
DIVISIONS: dict[str, dict[str, Any]] = {
    "sft": {"cluster.strategy": Strategy.FSDP2},
    "sft_of_a_mixture": {"cluster.strategy": Strategy.FSDP2, "cluster.expert_parallel_size": 2, **SELECTIVE},
    "dpo": {"cluster.strategy": Strategy.FSDP2, "cluster.offload": True, **SELECTIVE},
    "dpo_moving": {"cluster.strategy": Strategy.FSDP2},
    "dpo_of_three": {"ds.zero_stage": 3, "ds.sequence_parallel_size": 3, **SAVING},
    "rm": {"ds.zero_stage": 2, "ds.tensor_parallel_size": 2, **SAVING},
    "rm_of_three": {"cluster.strategy": Strategy.FSDP2, "ds.sequence_parallel_size": 3, **SELECTIVE},
    "prm": {"cluster.strategy": Strategy.FSDP2, "ds.sequence_parallel_size": 2},
}
"""How processes share a model, where not by ZeRO alone: two, or three, which divide queries, for there are two
key/value heads."""
ALIKE = "sft", "dpo", "dpo_of_three", "dpo_moving", "rm_of_three"
"""Runs of which the others show what is their own."""


@pytest.fixture
def served() -> Iterator[Callable[[Path], TeacherServer]]:
    """Starts servers of models, which end with the test."""
    servers: list[TeacherServer] = []

    def start(path: Path) -> TeacherServer:
        servers.append(TeacherServer(path))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=pytest.mark.wide if name in ALIKE else ()) for name in TRAINERS]
)
def test_learning_from_examples_in_several_processes_is_that_in_one(
    trainer: str,
    wide_headed_model_dir: Path,
    tiny_mixture_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: Callable[[Path], TeacherServer],
    request: pytest.FixtureRequest,
) -> None:
    if "ds.tensor_parallel_size" not in DIVISIONS.get(trainer, {}):  # which DeepSpeed would not forget
        request.getfixturevalue("runs_share_processes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # 7 rows of different lengths: processes get unlike shares of each step
    rows = [{"prompt": "What is it? " * (1 + a), "completion": f"It is {a}. " * (1 + 3 * (a % 2))} for a in range(7)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "No."} for row in rows]
    solutions = [
        {"prompt": row["prompt"], "completions": ["It is.", row["completion"]], "labels": [1, number % 2]}
        for number, row in enumerate(rows)
    ]
    kinds = {"dpo": pairs, "kto": pairs, "rm": pairs, "prm": solutions}
    examples = kinds.get(trainer.partition("_")[0], rows)
    model = tiny_mixture_dir if trainer == "sft_of_a_mixture" else wide_headed_model_dir
    make_run, train_on_examples, own = TRAINERS[trainer]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, examples)))

    def trained(name: str, processes: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        run = make_run()
        if isinstance(run, rollgrad.KDRun):
            run.teacher.model_name_or_path = str(wide_headed_model_dir)  # which the student moves away from
        if trainer == "kd_served":
            run.teacher.url, run.kd.top_k, run.kd.cache = served(wide_headed_model_dir).url, 8, True
        run.actor.model_name_or_path, run.actor.dtype = str(model), DType.FLOAT32
        run.actor.adam.lr = 1e-3
        run.data.dataset = run.eval.dataset = str(tmp_path / "rows.jsonl")
        run.data.cache_dir = str(tmp_path / f"cache_{name}")  # each computes the reference's log-probs itself
        run.train.batch_size, run.train.num_epochs = 4, 2
        if trainer == "dpo_streamed":  # the reference stays in processes of its own
            run.data.stream, run.train.num_epochs, run.train.max_steps = True, 1, 3
        if trainer == "dpo_moving":  # the average of adapters
            run.dpo.ref_sync_steps, run.actor.lora.rank = 2, 4
        run.ckpt.output_dir, run.logger.console = str(tmp_path / name), False
        if processes > 1:
            run.cluster.enable, run.cluster.timeout = True, 300
            run.actor.num_gpus_per_node = processes
            for setting, value in DIVISIONS.get(trainer, {"ds.zero_stage": 3}).items():
                section, _, name_there = setting.partition(".")
                setattr(getattr(run, section), name_there, value)
        result = train_on_examples(run)
        return logged(tmp_path / name), load_file(result.model / "model.safetensors")

    (alone, one), (divided_steps, two) = (
        trained("alone", 1),
        trained("divided", 3 if trainer.endswith("_of_three") else 2),
    )
    assert len(alone) == len(divided_steps)
    keys = ("train/loss", "train/grad_norm", "train/trained_tokens", "eval/loss", *own)
    for step, other in zip(alone, divided_steps, strict=True):
        if trainer == "dpo" and abs(step.get("train/reward_margin", 1.0)) < 1e-6:
            del step["train/accuracy"], other["train/accuracy"]  # policy is reference: rounding decides who wins
        for key in keys:
            assert (key in step) == (key in other)
            if key in step:
                assert other[key] == pytest.approx(step[key], rel=1e-3, abs=1e-5)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("runs_share_processes")
@pytest.mark.parametrize(
    "division",
    [pytest.param({"ds.zero_stage": 3}, marks=pytest.mark.wide), {"cluster.strategy": Strategy.FSDP2}],
    ids=["ZeRO-3", "FSDP2"],
)
def test_replies_of_a_prescribed_form_are_learned_from_in_several_processes(
    make: Callable[..., RLConfig], division: Mapping[str, Any], tmp_path: Path
) -> None:
    """Each process finds the allowed tokens again, of the policy and of the reference."""
    (tmp_path / "agent.py").write_text(FORM)

    def run(config: RLConfig) -> list[dict[str, float]]:
        config.ckpt.output_dir = str(tmp_path / ("divided" if config.cluster.enable else "lone"))
        config.train.agent_func_path = str(tmp_path / "agent.py")
        config.rollout.max_new_tokens, config.rollout.temperature = 24, 0.8
        config.algo.kl.estimator, config.algo.kl.top_k = KLEstimator.K3, None
        return train(config, reward=None)

    config, lone = make("form"), without_cluster(make("form"))
    for setting, value in division.items():
        section, _, name = setting.partition(".")
        setattr(getattr(config, section), name, value)
    found, expected = run(config), run(lone)
    assert abs(found[0]["policy/ref_kl"]) < 1e-6, "both are of the same weights and the same allowed tokens"
    assert found[1]["policy/ref_kl"] != 0
    for one, other in zip(expected, found, strict=True):
        for key in ("reward/mean", "rollout/entropy", "policy/loss", "policy/grad_norm", "policy/ref_kl"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5)
    kept = [*rollouts(Path(config.ckpt.output_dir), ("grammars", "token_logprob", "token_trainer_logprob"))]
    assert kept
    for row in kept:
        assert row["grammars"] is not None
        assert row["token_trainer_logprob"] == pytest.approx(row["token_logprob"], abs=1e-4)


@pytest.mark.usefixtures("runs_share_processes")
def test_replies_in_files_are_judged_in_processes_as_in_one(reward_model_dir: Path, tmp_path: Path) -> None:
    """The cluster has no places for the other models of a run, of which there would be too many for it."""
    source = tmp_path / "replies.jsonl"
    source.write_text("".join(json.dumps({"prompt": "What is it?", "completion": f"{a}."}) + "\n" for a in range(5)))
    found = []
    for clustered in (False, True):
        config = RLConfig()
        config.actor.model_name_or_path = config.reward.model_name_or_path = str(reward_model_dir)
        config.actor.dtype, config.reward.timeout = DType.FLOAT32, 300
        if clustered:
            config.cluster.enable, config.cluster.timeout, config.train.colocate_all = True, 60, True
            config.actor.num_gpus_per_node, config.reward.num_gpus_per_node = 1000, 2
        out = tmp_path / f"scored_{clustered}.jsonl"
        rollgrad.score(config, source, out)
        found.append([json.loads(line)["reward"] for line in out.read_text().splitlines()])
    assert len(set(found[0])) == 5
    assert found[1] == pytest.approx(found[0], abs=1e-4)


SHORT_WAIT = 0.2
"""Seconds of the longest wait that is not logged, here where engines start sooner than a user's."""


def says_what_it_waited_for(logs: Sequence[Mapping[str, Any]]) -> None:
    waits = [line["event"] for line in logs if "waiting for" in line["event"]]
    assert "waiting for 1 vLLM engine to start (at most 300 s)" in waits  # which takes longer than `SHORT_WAIT`
    began = [line.partition("waiting for ")[2] for line in waits if line.startswith("waiting for")]
    done = [line.partition("waiting for ")[2] for line in waits if line.startswith("done waiting for")]
    assert sorted(line.partition(" (")[0] for line in done) == sorted(line.partition(" (")[0] for line in began)
    assert all(re.search(r" \(\d+ s\)$", line) for line in done)


@pytest.fixture(scope="module")
def agents() -> Iterator[list[psutil.Process]]:
    """Ray's agents of killed controllers, which try for a minute to say that all others are dead."""
    left: list[psutil.Process] = []
    yield left
    cluster.wait_for(lambda: not any(map(cluster.lives, left)), "the end of Ray's agents")


def halted(config: RLConfig, run: "subprocess.Popen[bytes]") -> int:
    """Waits until a controller has halted; returns the id of its process."""
    told = Path(config.ckpt.output_dir) / controller.HALTED
    cluster.wait_for(lambda: run.poll() is not None or (told.exists() and told.read_text()), "a controller that halts")
    return int(told.read_text())


@pytest.mark.chaos
@pytest.mark.parametrize(
    "phase", [*(pytest.param(phase, marks=pytest.mark.wide) for phase in ("syncing", "training")), "saving"]
)
def test_a_killed_controller_leaves_no_process_and_its_run_continues(
    make: Callable[..., RLConfig],
    finished: RLConfig,
    agents: list[psutil.Process],
    phase: str,
    worker_host: ScriptHost,
    tmp_path: Path,
) -> None:
    config = divided(make(phase))
    config.actor.num_gpus_per_node = 1
    settings = tmp_path / "run.yaml"
    settings.write_text(dump_config(config))
    command = [*worker_host.python(), "-m", "tests.fakes.controller", str(settings), phase]
    with subprocess.Popen(command, cwd=ROOT, env=dict(os.environ) | {"RAY_ADDRESS": ""}) as run:
        try:
            pid = halted(config, run)
            workers = cluster.processes("ray::RankWorker")
            assert workers
            family = [*psutil.Process(pid).children(recursive=True), *workers]
            agents += [process for process in family if cluster.title_of(process) in RAY_AGENTS]
            os.kill(pid, signal.SIGKILL)
        finally:
            run.kill()
    others = [process for process in family if process not in agents]
    cluster.wait_for(lambda: not any(map(cluster.lives, others)), "the end of all processes", seconds=300)
    resumed = without_cluster(config)
    resumed.ds.zero_stage = RLConfig().ds.zero_stage
    resumed.ckpt.resume = True
    assert [line["step"] for line in train(resumed)] == list(range(1, STEPS + 1))
    for name, tensor in model(finished).items():
        torch.testing.assert_close(model(resumed)[name], tensor, rtol=0, atol=1e-3)


@pytest.mark.chaos
def test_a_terminated_controller_saves_what_its_processes_have(
    make: Callable[..., RLConfig], finished: RLConfig, worker_host: ScriptHost, tmp_path: Path
) -> None:
    """SIGTERM, as `ray job stop` and schedulers send it before they kill, in the middle of a rollout."""
    config = divided(make("terminated"))
    settings = tmp_path / "run.yaml"
    settings.write_text(dump_config(config))
    output = Path(config.ckpt.output_dir)
    command = [*worker_host.python(), "-m", "tests.fakes.controller", str(settings), "generating"]
    with subprocess.Popen(command, cwd=ROOT, env=dict(os.environ) | {"RAY_ADDRESS": ""}) as run:
        try:
            halted(config, run)
            assert not (output / "model").exists()
            run.send_signal(signal.SIGTERM)
            assert run.wait(300) == 0
        finally:
            run.kill()
    assert json.loads((output / "model.state.json").read_text())["step"] == 1
    resumed = without_cluster(config)
    resumed.ds.zero_stage = RLConfig().ds.zero_stage
    resumed.ckpt.resume = Resume.ALWAYS
    assert [line["step"] for line in train(resumed)] == list(range(1, STEPS + 1))
    for name, tensor in model(finished).items():
        torch.testing.assert_close(model(resumed)[name], tensor, rtol=0, atol=1e-3)


class Killer(MetricSink):
    """Kills one of the processes with a title when a step is reported, and the last one of each of the groups `later`
    when the next is: whatever is called next finds them dead."""

    def __init__(self, number: int, step: int, title: str, later: Mapping[str, WorkerGroup] | None = None) -> None:
        self.number, self.step, self.title, self.later = number, step, title, later or {}
        self.lines: list[Mapping[str, float]] = []
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "reward/mean" in metrics:
            self.lines.append(metrics)
            self.steps.append(step)
            if step == self.step:
                cluster.kill([cluster.processes(self.title)[self.number]])
            if step == self.step + 1:
                victims = [group.pids[-1] for group in self.later.values()]
                cluster.kill([p for p in cluster.processes("ray::RankWorker") if p.pid in victims])


def ppo_colocated(config: RLConfig, reward_model: str) -> dict[str, Any]:
    """Actor, critic, reference, reward model and the only engine share what there is, and take turns, in memory
    too."""
    config.algo.advantage.estimator = "gae"
    config.algo.kl = KLSettings(init_coef=0.01)  # whose reference stays as it is, in a process of its own
    config.critic.num_gpus_per_node = config.ref.num_gpus_per_node = 1
    config.reward.model_name_or_path, config.reward.timeout, config.reward.num_gpus_per_node = reward_model, 300, 1
    config.train.colocate_all = config.train.optimizer_sleeps = True
    config.train.profile_steps = STEPS - 1
    config.ds.zero_stage = 3
    return {"reward": None}


def partial_rollout(config: RLConfig, reward_model: str) -> dict[str, Any]:
    """The engine samples while the model is trained by FSDP2, and goes on with its new weights."""
    config.train.async_enable, config.train.max_staleness = True, 2
    config.train.partial_rollout = PartialRollout.KEEP
    config.algo.correction.level, config.algo.score_centering_top_k = CorrectionLevel.OFF, 24
    config.algo.kl.estimator, config.algo.kl.top_k = KLEstimator.K3, None
    config.train.max_steps = 4
    config.cluster.strategy = Strategy.FSDP2
    config.vllm.sync_backend, config.vllm.sync_delta = SyncBackend.DISK, True
    return {}


@pytest.mark.chaos
@pytest.mark.parametrize("arrange", [ppo_colocated, partial_rollout])
def test_every_pipeline_trains_with_vllm_and_goes_on_when_it_loses_what_is_not_trained(
    make: Callable[..., RLConfig],
    arrange: Callable[[RLConfig, str], dict[str, Any]],
    reward_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine's replacement has the weights of the step before, that of the reference or reward model its own."""
    monkeypatch.setitem(waiting_for.__wrapped__.__kwdefaults__, "after", SHORT_WAIT)  # type: ignore[attr-defined]
    config = make(arrange.__name__, vllm=True)
    adapters = arrange(config, str(reward_model_dir))
    config.ckpt.state_steps = 1
    frozen: dict[str, WorkerGroup] = {}
    build = WorkerGroup.build

    def noted(group: WorkerGroup, *arguments: Any) -> None:
        if group.name in ("reference", "reward"):
            frozen[group.name] = group
        build(group, *arguments)

    monkeypatch.setattr(WorkerGroup, "build", noted)
    killer = Killer(0, step=1, title="ray::EngineHost", later=frozen)
    played: list[Trajectory] = []
    with capture_logs() as logs:
        rollgrad.train(
            config,
            sample_log=lambda step, groups: played.extend(t for group in groups for t in group.trajectories),
            **{"reward": FakeRewardSource(letters), "sink": killer} | adapters,
        )
    says_what_it_waited_for(logs)
    lines = killer.lines
    assert killer.steps == list(range(1, config.train.max_steps + 1))
    fresh = [line for line in lines if line.get("staleness/max", 0.0) == 0]
    assert all(line["policy/mismatch_kl"] < 1e-5 for line in fresh), "engine and trainer agree on what they sample"
    assert all(line["sync/bytes"] > 0 for line in lines)
    assert all(line["rollout/samples"] == 8 for line in lines), "the lost engine's replies are played again"
    assert (Path(config.ckpt.output_dir) / "model" / "model.safetensors").exists()
    if arrange is ppo_colocated:
        assert all(line["critic/loss"] > 0 for line in lines)
        assert len(played) == len(lines) * 8
        replies = [RewardInput(text="", token_ids=tuple(each.token_ids_T.tolist())) for each in played]
        wanted = [score for score, _ in cluster.reward_model(str(reward_model_dir)).judge(replies)]
        assert [each.reward for each in played] == pytest.approx(wanted, abs=1e-4)
        models = {"run", "actor-0", "actor-1", "critic-0", "reference-0", "reward-0"}
        last = Path(config.ckpt.output_dir) / "profile" / f"step-{STEPS:06d}"
        assert traced(last) == models | {"engine-0-vllm-0"}, "also of the engine in the lost one's place"
    else:
        nothing_is_lost(config)
        assert all(line["policy/centering_residual"] < 1e-3 for line in fresh), "nothing is to be taken out of these"
        assert any(line["policy/centering_residual"] > 1e-2 for line in lines)
        (last,) = (Path(config.ckpt.output_dir) / "weights").iterdir()
        assert last.name == str(config.train.max_steps)
    for title in ("ray::RankWorker", "ray::EngineHost"):
        cluster.wait_for(lambda title=title: not cluster.processes(title), "the end of the run's processes")


@pytest.mark.chaos
def test_a_lost_rank_ends_the_run_which_continues(make: Callable[..., RLConfig], finished: RLConfig) -> None:
    """In bounded time, with an error that names it, and from a state from which the run goes on as if nothing was."""
    broken = divided(make("broken"))
    broken.ckpt.save_steps = 1
    killer = Killer(1, step=2, title="ray::RankWorker")
    errors: list[str] = []

    def trained(run: RLConfig) -> Any:
        if errors:
            cluster.wait_for(lambda: not cluster.processes("ray::RankWorker"), "the end of the others")
            cluster.policy(str(Path(broken.ckpt.output_dir) / "step_1"))  # loads
        try:
            return rollgrad.train(run, reward=FakeRewardSource(letters), sink=killer)
        except LostProcessError as error:
            killer.step = STEPS + 1
            errors.append(str(error))
            raise

    until_finished(broken, trained)
    assert len(errors) == 1
    assert re.search(r"processes of actor, rank \d died while 'save' was under way", errors[0])
    for name, tensor in model(finished).items():
        torch.testing.assert_close(model(broken)[name], tensor, rtol=0, atol=1e-6)
