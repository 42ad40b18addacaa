"""The machines that a dry run plans for: those that `cluster.plan_for` describes, else machines like this one."""

import os
from typing import TYPE_CHECKING

from attrs import frozen

from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.cluster import ClusterConfig

if TYPE_CHECKING:
    import torch

GIB = 2**30
TERA = 1e12


@frozen(kw_only=True)
class PlannedMachine:
    """A machine as the plan takes all of the run's to be.

    `device`: where models compute. `dtype`: the format that they compute in. `speed`: floating-point operations a
    second of a large product there, measured here unless it is `told`.
    """

    machine: Machine
    device: "torch.device"
    dtype: "torch.dtype"
    speed: float
    told: bool

    @property
    def heading(self) -> str:
        """Returns what a plan's heading says of the machine; nothing where it is this one."""
        gpu, memory = self.machine.gpu / GIB, self.machine.memory / GIB
        return f" on machines of {memory:,.0f} GiB with GPUs of {gpu:,.0f} GiB" if self.told else ""

    @property
    def source(self) -> str:
        """Returns where the speed is from, in words."""
        return "as --cluster.plan_for says" if self.told else "which one large product reaches here"


def planned_machine(config: RLConfig) -> PlannedMachine:
    """Returns the machine that the run is planned for; other machines of a cluster are not known before the run."""
    import torch

    from rollgrad.adapters.models.torch.loading.loading import default_device, resolve_dtype
    from rollgrad.adapters.models.torch.planning.product_speed import product_speed

    if config.cluster.plan_for is not None:
        gpu, memory, speed = config.cluster.plan_for
        device = torch.device("cuda")
        auto = config.actor.dtype == "auto"  # `resolve_dtype` would ask for the GPU, which is elsewhere
        return PlannedMachine(
            machine=Machine(gpu=int(gpu * GIB), memory=int(memory * GIB)),
            device=device,
            dtype=torch.bfloat16 if auto else resolve_dtype(config.actor.dtype, device),
            speed=speed * TERA,
            told=True,
        )
    device = default_device()
    dtype = resolve_dtype(config.actor.dtype, device)
    speed = product_speed(device, dtype)
    return PlannedMachine(machine=this_machine(), device=device, dtype=dtype, speed=speed, told=False)


def this_machine() -> Machine:
    """Returns the memory of the machine where this process is."""
    import torch

    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return Machine(gpu=gpu, memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def knows_machines(cluster: ClusterConfig) -> bool:
    """Returns whether a plan is for the run's machines: not where a cluster is joined, and nothing tells what they
    have."""
    return cluster.address is None or cluster.plan_for is not None


def elsewhere_sentence(config: RLConfig) -> str | None:
    """Returns what to add to a plan that does not know the run's machines."""
    if knows_machines(config.cluster):
        return None
    return (
        "The plan takes the cluster's machines to be like this one: tell what they have by --cluster.plan_for GPU_GIB "
        "MEMORY_GIB TFLOPS, as --cluster.plan_for 80 2048 989 for H100s of 80 GiB in machines of 2 TiB."
    )
