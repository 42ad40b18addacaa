"""The section `cluster`: models and engines in processes of their own."""

from attrs import define

from rollgrad.domain.settings import POSITIVE, Condition, setting

IN_CLUSTER = Condition(
    lambda here, run: run.cluster.enable,
    "models and engines have no processes of their own",
    "turn on --cluster.enable",
)
"""Condition of settings of several processes."""


@define(kw_only=True)
class ClusterConfig:
    """Ray: models and engines in processes of their own."""

    enable: bool = setting(
        False,
        "Let Ray place models, and engines of a run that samples, in processes of their own, and DeepSpeed train in "
        "them (pip install rollgrad[ray,deepspeed,vllm]); without it models are trained in this process.",
    )
    address: str | None = setting(
        None,
        "Ray cluster to join: auto, or host:port of its head; none starts one on this machine for as long as the run.",
        only_if=IN_CLUSTER,
    )
    timeout: float = setting(
        1800.0, "Seconds that any wait for a training process may take.", POSITIVE, only_if=IN_CLUSTER
    )
