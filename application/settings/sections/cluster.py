"""The section `cluster`: models and engines in processes of their own."""

from attrs import define

from rollgrad.domain.settings import POSITIVE, setting


@define(kw_only=True)
class ClusterConfig:
    """Ray: models and engines in processes of their own."""

    enable: bool = setting(
        False,
        "Let Ray place actor, critic, reference and vLLM engines in processes of their own, and DeepSpeed train in "
        "them (pip install rollgrad[ray,deepspeed,vllm]); without it models are trained in this process.",
    )
    address: str | None = setting(
        None,
        "Ray cluster to join: auto, or host:port of its head; none starts one on this machine for as long as the run.",
    )
    timeout: float = setting(1800.0, "Seconds that any wait for a training process may take.", POSITIVE)
