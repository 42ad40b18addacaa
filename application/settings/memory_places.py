"""The memory that processes of a run share: who is on which device, and what is held there at once.

Roles that share a device are added up; what they hold at different times is not: models pass over their tokens one
after the other, and where rollout and update take turns neither goes on during the other. Does not own: what one
process holds (`memory_plan.py`).
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

from rollgrad.application.settings.memory_plan_passes import MIB

CONTEXT_BYTES = 600 * 2**20
"""Memory of a GPU that each process takes for CUDA itself, its libraries and their buffers."""

GROUP_BYTES = 700 * 2**20
"""Memory of a GPU that a process takes for what NCCL sends in each group of processes: 688 MB with three or more on
A100s joined by NVLink (NVIDIA/nccl#964)."""


@frozen(kw_only=True)
class Machine:
    """Bytes of memory: of one GPU, 0 where there is none, and of the machine. Every machine is taken to be alike."""

    gpu: int
    memory: int


@frozen(kw_only=True)
class RoleMemory:
    """Bytes that one process of a role holds: on its GPU, or in the machine's memory where there are no GPUs."""

    role: str
    processes: int
    on_a_machine: int
    device: str
    """Roles of one device share it."""
    weights: int = 0
    gradients: int = 0
    """Held from the first pass of an optimizer step to its end."""
    optimizer: int = 0
    passes: int = 0
    """Activations of a pass, and what ZeRO gathers for it: gradients on their way, and at the last stage weights. Of an
    engine: keys and values."""
    offloaded: int = 0
    """In the machine's memory, not on a GPU."""
    loading: int = 0
    """In the machine's memory while the model is loaded for a GPU."""
    takes_turns: bool = False
    """Whether an engine or reward model makes no passes while models train."""
    sleeps: bool = False
    """Whether an engine holds nothing while models train but its groups of NCCL and what is `asleep`."""
    keeps_gradients: bool = False
    """Whether gradients, and the buffer in which they are sent, outlast the step, as at ZeRO's last stage."""
    rests: int = 0
    """Part of the optimizer that is in the machine's memory while engines sample."""
    groups: int = 0
    """Groups of NCCL whose memory is counted nowhere else."""
    buckets: int = 0
    """Buckets of weights on their way to engines, held until these have their keys and values."""
    asleep: int = 0
    """Bytes that an engine holds while it sleeps."""

    @property
    def kept(self) -> int:
        """Bytes that are kept while other roles compute."""
        if self.sleeps:
            return self.asleep
        return self.weights + self.optimizer + self.buckets + (self.gradients if self.keeps_gradients else 0)

    @property
    def total(self) -> int:
        """Bytes on the device, without offloaded ones."""
        return self.weights + self.gradients + self.optimizer + self.passes + self.buckets


@frozen(kw_only=True)
class Place:
    """A memory that processes share: bytes that are held at once, and bytes that there are."""

    name: str
    held: int
    available: int


def places(rows: Sequence[RoleMemory], machine: Machine) -> Iterator[Place]:
    """Every memory that the run uses: GPUs by who shares them, and that of the machine with most processes."""
    if not machine.gpu:
        held = _at_once((row, row.on_a_machine) for row in rows)
        yield Place(name="a machine's memory", held=held, available=machine.memory)
        return
    for device in dict.fromkeys(row.device for row in rows):
        sharing = [row for row in rows if row.device == device]
        name = f"a GPU of {', '.join(row.role for row in sharing)}"
        groups = sum(row.groups for row in sharing)
        held = _at_once((row, 1) for row in sharing) + len(sharing) * CONTEXT_BYTES + groups * GROUP_BYTES
        yield Place(name=name, held=held, available=machine.gpu)
    offloaded = sum(row.on_a_machine * (row.offloaded + row.rests) for row in rows)
    loading = max(row.on_a_machine * row.loading for row in rows)  # models are loaded one after the other
    if offloaded or loading:
        yield Place(name="a machine's memory", held=offloaded + loading, available=machine.memory)


def gpu_count(rows: Sequence[RoleMemory]) -> str:
    """Returns a sentence with the GPUs that the roles of a cluster take, each shared by those of one device."""
    most = {row.device: 0 for row in rows}
    for row in rows:
        most[row.device] = max(most[row.device], row.processes)
    of = (f"{count} of {', '.join(row.role for row in rows if row.device == name)}" for name, count in most.items())
    return f"GPUs of the run: {sum(most.values())} ({'; '.join(of)})"


def shortages(rows: Sequence[RoleMemory], machine: Machine) -> Iterator[str]:
    """A sentence for each place where the run does not fit, and of engines that the share which vLLM may take of a GPU
    does not hold."""
    for row in rows:
        if row.role == "engines" and machine.gpu and row.weights and not row.passes:
            yield (
                f"This may not fit: an engine's weights take {row.weights / MIB:,.0f} MiB of a GPU, which "
                "vllm.gpu_memory_utilization does not leave it, with room for keys and values: raise "
                "--vllm.gpu_memory_utilization, or divide the model over more GPUs (--vllm.tensor_parallel_size)."
            )
    for place in places(rows, machine):
        if place.held > place.available:
            yield (
                f"This may not fit: {place.name} would hold {place.held / MIB:,.0f} MiB at once, and has "
                f"{place.available / MIB:,.0f}. Lower --train.max_tokens_per_micro_batch (or, where engines share a "
                "GPU, --vllm.gpu_memory_utilization), turn on --actor.gradient_checkpointing or "
                "--actor.offload_activations, keep optimizers in the machine's memory (--ds.adam_offload, with FSDP2 "
                "--cluster.offload, or --train.optimizer_sleeps while engines sample), divide models over more "
                "processes (--cluster.enable, --actor.num_gpus_per_node, --ds.zero_stage 3), or samples that alone are "
                "too long for a pass over several (--ds.sequence_parallel_size)."
            )


def _at_once(rows: Iterable[tuple[RoleMemory, int]]) -> int:
    """Returns the bytes that are in one memory at once, for rows of a role and the number of its processes there."""
    always, passes, turns, resting = 0, [0], 0, 0
    for row, count in rows:
        always += count * (row.kept - row.rests)
        resting += count * row.rests
        other = count * (row.total - row.kept)
        if row.takes_turns:
            turns += other
        elif row.role in ("engines", "reward"):  # at any time: replies are judged while others are sampled
            always += other
        else:
            passes.append(other)
    return always + max(resting + max(passes), turns)
