"""The section `ref`: the frozen reference."""

from attrs import define

from rollgrad.application.settings.sections.cluster import IN_CLUSTER
from rollgrad.domain.settings import COUNT, setting


@define(kw_only=True)
class RefConfig:
    """The frozen reference that KL is measured against."""

    model_name_or_path: str | None = setting(None, "Model of the reference; default: the actor's starting point.")
    num_nodes: int | None = setting(
        None, "Machines that hold the reference; default: as many as the actor's.", COUNT, only_if=IN_CLUSTER
    )
    num_gpus_per_node: int | None = setting(
        None,
        "Processes on each of them; default: as many as the actor's.",
        COUNT,
        only_if=IN_CLUSTER,
    )
    offload: bool = setting(
        False,
        "Divide the reference over its processes, in the CPU's memory: each layer is fetched when it computes.",
        only_if=IN_CLUSTER,
    )
