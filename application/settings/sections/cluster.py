"""The section `cluster`: models and engines in processes of their own."""

from enum import StrEnum

from attrs import define

from rollgrad.domain.settings import NOT_NEGATIVE, POSITIVE, Condition, Range, setting


class Strategy(StrEnum):
    """How models that are trained are divided over their processes."""

    DEEPSPEED = "deepspeed"
    """By DeepSpeed's ZeRO, as the section ds says."""
    FSDP2 = "fsdp2"
    """By torch's FSDP2: parameters, gradients and the optimizer's state, layer by layer."""


IN_CLUSTER = Condition(
    lambda here, run: run.cluster.enable,
    "models and engines have no processes of their own",
    "turn on --cluster.enable",
)
"""Condition of settings of several processes."""

BY_DEEPSPEED = Condition(
    lambda here, run: run.cluster.strategy is Strategy.DEEPSPEED,
    "cluster.strategy is {run.cluster.strategy}",
    "set --cluster.strategy deepspeed",
)
"""Condition of DeepSpeed's own settings."""

BY_FSDP2 = Condition(
    lambda here, run: here.strategy is Strategy.FSDP2, "cluster.strategy is {here.strategy}", "set --{at}strategy fsdp2"
)


@define(kw_only=True)
class ClusterConfig:
    """Ray: models and engines in processes of their own."""

    enable: bool = setting(
        False,
        "Let Ray place models, and engines of a run that samples, in processes of their own, and DeepSpeed train in "
        "them (pip install rollgrad[ray,deepspeed,vllm]); without it models are trained in this process.",
    )
    strategy: Strategy = setting(
        Strategy.DEEPSPEED,
        "How models are divided over their processes: by DeepSpeed's ZeRO (section ds), or by torch's FSDP2, which "
        "divides parameters, gradients and the optimizer's state, and needs no DeepSpeed.",
        only_if=IN_CLUSTER,
    )
    offload: bool = setting(
        False,
        "Keep what FSDP2 divides in the CPU's memory, and step there.",
        only_if=(IN_CLUSTER, BY_FSDP2),
    )
    expert_parallel_size: int = setting(
        1,
        "Processes that divide the experts of each layer of a mixture among them, and send tokens to each other; under "
        "FSDP2. It divides the processes of every model and the number of experts.",
        POSITIVE,
        only_if=(IN_CLUSTER, BY_FSDP2),
    )
    address: str | None = setting(
        None,
        "Ray cluster to join: auto, or host:port of its head; none starts one on this machine for as long as the run.",
        only_if=IN_CLUSTER,
    )
    plan_for: tuple[float, float, float] | None = setting(
        None,
        "The machines that --dry_run plans for, where it runs elsewhere: GiB of a GPU, GiB of a machine's memory, and "
        "TFLOP/s of a GPU (80 2048 989 for H100s); default: machines like this one. It changes nothing of a run.",
        Range(lambda machine: min(machine) > 0, "three numbers greater than 0"),
    )
    timeout: float = setting(
        1800.0, "Seconds that any wait for a training process may take.", POSITIVE, only_if=IN_CLUSTER
    )
    max_restarts: int = setting(
        3,
        "Times that a run of the command line starts again from its last training state when a process that trains is "
        "lost. After an hour of training the count begins anew.",
        NOT_NEGATIVE,
        only_if=IN_CLUSTER,
    )
