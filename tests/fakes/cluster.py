"""Small models that the processes of a test's cluster hold, and functions that can be imported there."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psutil
import torch
from attrs import evolve
from torch import Tensor, distributed

from rollgrad.adapters.models.deepspeed.forward_only import forward_only
from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
from rollgrad.adapters.models.fsdp.division import divide
from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule
from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.ray.rank_worker import begin_workers
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch import models
from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.experts.expert_parallel import join_expert_groups
from rollgrad.adapters.models.torch.experts.router_replay import install_router_replay
from rollgrad.adapters.models.torch.layers.sequence_parallel import join_sequence_group
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.weight_shards import Shard, shard_rows, whole_layers
from rollgrad.adapters.models.torch.models import Optimize, TorchPolicy
from rollgrad.adapters.models.torch.optimizers.muon import MuonSettings
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.models.torch.rewards.step_reward import StepRewardModel
from rollgrad.adapters.models.torch.rewards.together import Divide
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.adapters.ray.placement import Placement
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.ports.models import LossOutput, PolicyModel, TokenScores, ValueModel
from rollgrad.testing.agent_executor import make_trajectory
from tests.compiled_layers import AS_IT_IS, compiler, graphs
from tests.tensor_bytes import tensor_bytes

FLAG = "--actor.model_name_or_path"
STEPS = 3
SETTINGS = OptimizerSettings(lr=1e-2, total_steps=10, scheduler="linear", weight_decay=0.1, max_norm=0.5, ema_beta=0.7)
"""Everything that an optimizer step knows is in play: the gradients of `batch` exceed the norm."""

AUX_LOSS_COEF = 5.0
"""Large enough to be seen beside `likelihood`."""

MUON_SETTINGS = evolve(SETTINGS, muon=MuonSettings(lr=2e-2))


@contextmanager
def worker_group(size: int, *, timeout: float = 300) -> Iterator[WorkerGroup]:
    """Processes of one thread each, on whatever Ray is there."""
    placement = Placement("actor", size, gpus=0, timeout=timeout)
    workers = begin_workers([placement.slot(rank) for rank in range(size)], threads=1)
    group = WorkerGroup("actor", workers, timeout=timeout)
    try:
        yield group
    finally:
        group.close()
        placement.remove()


def policy(
    path: str,
    optimize: Optimize = MasterOptimizer,
    *,
    settings: OptimizerSettings = SETTINGS,
    dtype: torch.dtype = torch.float32,
    aux_loss_coef: float = 0.0,
    shard: Shard | None = None,
    compiles: bool = False,
) -> TorchPolicy:
    model = load_causal_lm(path, dtype=dtype, device=torch.device("cpu"), flag=FLAG, shard=shard)
    if compiles:
        compile_layers(model)
    tokenizer = load_tokenizer(path, flag=FLAG)
    return TorchPolicy(
        model,
        tokenizer,
        settings,
        aux_loss_coef=aux_loss_coef,
        router_z_loss_coef=aux_loss_coef,
        optimize=optimize,
    )


def value(
    path: str,
    optimize: Optimize = MasterOptimizer,
    *,
    dtype: torch.dtype = torch.float32,
    shard: Shard | None = None,
    compiles: bool = False,
) -> TorchValue:
    model = load_causal_lm(path, dtype=dtype, device=torch.device("cpu"), flag=FLAG, shard=shard)
    if compiles:
        compile_layers(model)
    return TorchValue(model, load_tokenizer(path, flag=FLAG), SETTINGS, optimize=optimize)


def rank_policy(
    path: str,
    stage: int | str,
    offload: bool = False,
    settings: OptimizerSettings = SETTINGS,
    dtype: torch.dtype = torch.float32,
) -> RankPolicy:
    return RankPolicy(policy(path, divided(stage, offload), settings=settings, dtype=dtype, shard=loading(stage)))


class CompiledPolicy(RankPolicy):
    """Says how many graphs its process has compiled."""

    def graphs(self) -> int:
        """The number of graphs."""
        return graphs()


def rank_compiled(path: str, stage: int) -> CompiledPolicy:
    with compiler(AS_IT_IS):
        return CompiledPolicy(policy(path, divided(stage), shard=loading(stage), compiles=True))


def rank_policy_on_gpu(path: str, stage: int | str) -> "GPUPolicy":
    model = load_causal_lm(path, dtype=torch.bfloat16, device=torch.device("cuda"), flag=FLAG, shard=loading(stage))
    return GPUPolicy(TorchPolicy(model, load_tokenizer(path, flag=FLAG), SETTINGS, optimize=divided(stage)))


class GPUPolicy(RankPolicy):
    """Says how many bytes its process has of the GPU's memory."""

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()


def rank_policy_in_float16(path: str, stage: int | str, supported: bool) -> RankPolicy:
    """DeepSpeed is told whether the machine computes float16; torch does, on any."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: supported
    return rank_policy(path, stage, dtype=torch.float16)


def rank_mixture(path: str, stage: int | str) -> RankPolicy:
    return RankPolicy(policy(path, divided(stage), aux_loss_coef=AUX_LOSS_COEF, shard=loading(stage)))


def replaying(path: str, optimize: Optimize = MasterOptimizer, shard: Shard | None = None) -> TorchPolicy:
    """A mixture that goes to the experts that it is told, and says to which it went."""
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG, shard=shard)
    with whole_layers(model):
        install_router_replay(model, "actor.router_replay is trainer")
    tokenizer = load_tokenizer(path, flag=FLAG)
    return TorchPolicy(
        model, tokenizer, SETTINGS, keeps_experts=True, gradient_checkpointing=Checkpointing.FULL, optimize=optimize
    )


def rank_replaying(path: str, stage: int | str) -> RankPolicy:
    return RankPolicy(replaying(path, divided(stage), loading(stage)))


def rank_policy_with_a_spare(path: str, stage: int | str) -> RankPolicy:
    """Its model has a weight that it does not compute with."""
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    model.spare = torch.nn.Linear(4, 4)
    return RankPolicy(TorchPolicy(model, load_tokenizer(path, flag=FLAG), SETTINGS, optimize=divided(stage)))


def doomed_policy(path: str, stage: int | str) -> "DoomedPolicy":
    return DoomedPolicy(policy(path, divided(stage), shard=loading(stage)))


class DoomedPolicy(RankPolicy):
    """Its process kills itself, if it has that rank, in the middle of what `doom` names."""

    def doom(self, rank: int, phase: str) -> None:
        """Armed when all processes have answered."""
        models.GATHERED_BYTES = 1  # weights that are divided are then put together one by one
        if torch.distributed.get_rank() != rank:
            return
        policy = self.policy
        if phase == "score":
            policy.module.model.layers[1].register_forward_pre_hook(die)
        elif phase == "update":
            policy.module.model.layers[1].register_full_backward_pre_hook(die)
        elif phase == "save":
            policy._tokenizer.save_pretrained = die  # the model's own files are written by then
        elif phase == "state":
            policy._trained._whole = die  # type: ignore[attr-defined]
        else:
            policy.weights = partial(cut_short, policy.weights)  # type: ignore[method-assign]


def cut_short(weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    for index, weight in enumerate(weights()):
        if index == 3:
            die()
        yield weight


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Idle:
    """Holds no model."""

    def held(self) -> int:
        """Bytes of the tensors in this process."""
        return tensor_bytes()

    def waits(self) -> set[float]:
        """Seconds that exchanges of this process wait for others, in any group that was made."""
        groups = distributed.distributed_c10d._world.pg_map
        return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


class MeasuredPolicy(RankPolicy, Idle):
    """Says what its process holds."""


def idle() -> Idle:
    """Leaves a group as it was when it had started."""
    join_sequence_group(1, timeout=300)
    join_expert_groups(1, timeout=300)
    return Idle()


def measured_policy(path: str, stage: int | str) -> MeasuredPolicy:
    return MeasuredPolicy(policy(path, divided(stage), shard=loading(stage)))


def weighing(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """`likelihood`, which also says what the process holds before its backward pass."""
    held = torch.tensor(float(tensor_bytes()), dtype=torch.float64)
    return evolve(likelihood(scores, part), metrics={"held": held})


def rank_value(path: str, stage: int | str) -> TorchValue:
    """Memory that nobody writes is NaN: at the last stage, what fills up a bias that processes divide."""
    torch.use_deterministic_algorithms(True)  # which is how torch fills it
    try:
        return value(path, divided(stage), shard=loading(stage))
    finally:
        torch.use_deterministic_algorithms(False)


def rank_reference(path: str, stage: int | str = 0, offload: bool = False) -> TorchReference:
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG, shard=loading(stage))
    return TorchReference(model, divide=dividing(stage, offload))


def dividing(stage: int | str, offload: bool) -> Divide:
    """Divides a frozen model."""
    if stage == FSDP:
        return partial(divide, offload=offload)
    return partial(forward_only, division=DeepSpeedSettings(zero_stage=int(stage), param_offload=offload))


def reward_model(path: str, **division: Any) -> RewardModel:
    flag = "--reward.model_name_or_path"
    return RewardModel.load(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        flag=flag,
        policy_tokenizer=load_tokenizer(path, flag=flag),
        **division,
    )


def rank_reward_model(path: str, stage: int | str, offload: bool) -> RewardModel:
    """Its passes have a text or two."""
    return reward_model(path, batch_tokens=8, shard=loading(stage), divide=dividing(stage, offload))


def step_model(path: str, divide: Divide | None = None, shard: Shard | None = None) -> StepRewardModel:
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG, shard=shard)
    return StepRewardModel(model, load_tokenizer(path, flag=FLAG), (7, 8), batch_tokens=8, divide=divide)


def rank_step_model(path: str, stage: int | str, offload: bool) -> StepRewardModel:
    return step_model(path, dividing(stage, offload), loading(stage))


FSDP = "fsdp2"
"""In the place of a stage of ZeRO."""


def loading(stage: int | str) -> Shard | None:
    """As a run's processes load: at ZeRO-3 and for FSDP2 each reads its own share alone."""
    return shard_rows if stage in (3, FSDP) else None


def divided(stage: int | str, offload: bool = False) -> Optimize:
    """`offload` keeps everything that the stage can spare in the CPU's memory."""
    if stage == FSDP:
        return partial(FSDPTrainedModule, offload=offload)
    division = DeepSpeedSettings(zero_stage=stage, adam_offload=offload, param_offload=offload and stage == 3)
    return partial(DeepSpeedModule, division=division)


def batch(samples: int = 5) -> PackedBatch:
    """Samples of two prompts and unlike lengths."""
    packed = pack(
        [make_trajectory([5, 6, 7 + i % 2], [20 + i] * (2 * i + 1), [9], [30], group_id=i % 2) for i in range(samples)]
    )
    weights_N = torch.where(packed.action_mask_N, 0.1, 0.0)
    returns_N = torch.linspace(-1, 1, packed.token_count)
    return evolve(packed, loss_weights_N=weights_N, value_weights_N=weights_N, returns_N=returns_N)


def trained(policy: PolicyModel, steps: int = STEPS) -> dict[str, float]:
    """Takes so many optimizer steps on two micro-batches; returns the metrics of the last."""
    packed = batch()
    metrics: dict[str, float] = {}
    for _ in range(steps):
        metrics = policy.update([packed.select([0, 1, 4]), packed.select([2, 3])], likelihood)
    return metrics


def fitted(critic: ValueModel) -> dict[str, float]:
    """Takes the steps of `trained` with a critic on one micro-batch; returns the metrics of the last."""
    metrics: dict[str, float] = {}
    for _ in range(STEPS):
        metrics = critic.update([batch()], squared)
    return metrics


def weights(policy: PolicyModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def likelihood(scores: TokenScores, part: PackedBatch) -> LossOutput:
    weights_N = part.filled("loss_weights_N")
    loss = -(weights_N * (scores.logprobs_N + 0.1 * scores.entropy_N)).sum()
    return LossOutput(loss=loss, metrics={"likelihood": (weights_N * scores.logprobs_N).sum().detach()})


def squared(values_N: Tensor, part: PackedBatch) -> LossOutput:
    loss = (part.filled("value_weights_N") * (values_N - part.filled("returns_N")).square()).sum()
    return LossOutput(loss=loss)


def steep(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """A finite loss whose gradient is not."""
    return LossOutput(loss=likelihood(scores, part).loss + (0 * scores.logprobs_N.sum()).abs().sqrt())


def broken(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """Not finite for one of the samples alone."""
    poison = torch.where(part.tokens_N == 24, torch.inf, 0.0).sum()
    return LossOutput(loss=likelihood(scores, part).loss + poison)


def failing(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """Fails in the last process alone."""
    if distributed.get_rank() == distributed.get_world_size() - 1:
        raise KeyError("advantage")
    return likelihood(scores, part)


kept_pids: set[int] = set()
"""Worker processes that outlive the tests that use them."""


def processes(title: str) -> list[psutil.Process]:
    """Ray's processes whose title begins with `title`, oldest first, without those that are kept."""
    children = psutil.Process().children(recursive=True)
    found = [p for p in children if p.pid not in kept_pids and title_of(p).startswith(title)]
    return sorted(found, key=lambda p: p.create_time())


def title_of(process: psutil.Process) -> str:
    """Empty of one that has ended, also while it was looked at."""
    try:
        process.create_time()  # which psutil remembers
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def kill(victims: Iterable[psutil.Process]) -> None:
    """Those that have not ended by themselves."""
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def wait_for(event: Callable[[], object], what: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not event():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.2)
