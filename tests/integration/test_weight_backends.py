"""The trainer's messages by NCCL and CUDA IPC are those that vLLM's own engines expect: its classes, without its
processes.

Broadcasts and handles are replaced by queues and tables, for they need GPUs.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attrs import define, field

from rollgrad.adapters.engines.vllm.launch import start
from rollgrad.adapters.engines.vllm.plugin import VLLM_BACKENDS
from rollgrad.adapters.weights import nccl
from rollgrad.adapters.weights.cuda_ipc import cuda_ipc, exported, packed_update
from rollgrad.adapters.weights.gpu_buckets import Packer
from rollgrad.adapters.weights.nccl import Rendezvous, init_infos
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import PolicyModel

CPU = torch.device("cpu")
SECONDS = 60.0
"""After which a test has hung."""


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for index in range(12):
        dtype = torch.bfloat16 if index % 4 else torch.float32
        yield f"layers.{index}.weight", torch.randn(5 + 7 * (index % 3), 9, generator=generator).to(dtype)


@define
class Wire:
    """Both ends of a group of two."""

    device: torch.device = CPU
    joined: list[Rendezvous] = field(factory=list)
    sent: "queue.Queue[torch.Tensor]" = field(factory=queue.Queue)
    arrived: "queue.Queue[None]" = field(factory=queue.Queue)

    def join(self, rendezvous: Rendezvous) -> None:
        self.joined.append(rendezvous)

    def send(self, memory: torch.Tensor) -> None:
        self.sent.put(memory)
        self.arrived.get(timeout=SECONDS)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Configuration of vLLM's end."""
        memory = self.sent.get(timeout=SECONDS)
        assert (src, tensor.shape, tensor.dtype) == (0, memory.shape, memory.dtype)
        tensor.copy_(memory)
        self.arrived.put(None)


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's end runs without a GPU."""
    from vllm.distributed.weight_transfer import packed_tensor

    class NoStream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: [NoStream()] * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


@pytest.mark.parametrize("bucket_bytes", [100, 2000, 2**20])
def test_every_bucket_is_one_broadcast_to_vllm(
    monkeypatch: pytest.MonkeyPatch, without_streams: None, bucket_bytes: int
) -> None:
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    wire = Wire()
    monkeypatch.setattr(nccl, "_group", wire)
    monkeypatch.setattr(nccl, "Packer", lambda device: Packer(device, bucket_bytes))
    arrived: dict[str, torch.Tensor] = {}

    def take(info: dict[str, Any]) -> None:
        update = NCCLWeightTransferEngine.update_info_cls(**info)
        shapes = zip(update.shapes, (getattr(torch, name) for name in update.dtype_names), strict=True)
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter(zip(update.names, shapes, strict=True)),
            group=wire,
            src=0,
            post_unpack_func=lambda named: arrived.update({name: tensor.clone() for name, tensor in named}),
            buffer_size_bytes=bucket_bytes,
            device=CPU,
        )

    reading: threading.Thread | None = None
    for contents in nccl.broadcast(weights(), Rendezvous("127.0.0.1", 1, 2)):
        if reading is not None:
            reading.join(SECONDS)
        reading = threading.Thread(target=take, args=(contents.update().info,), daemon=True)
        reading.start()
    assert reading is not None
    reading.join(SECONDS)
    assert wire.joined == [Rendezvous("127.0.0.1", 1, 2)]
    assert wire.sent.empty()
    expected = dict(weights())
    assert arrived.keys() == expected.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("engines", "workers"), [(1, 1), (3, 1), (2, 4)])
def test_vllm_takes_the_rendezvous_and_every_worker_has_a_rank_of_its_own(engines: int, workers: int) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    infos = init_infos(Rendezvous("10.0.0.1", 4711, 1 + engines * workers), workers)
    parsed = [NCCLWeightTransferEngine.init_info_cls(**info) for info in infos]
    assert len(parsed) == engines
    taken = [0, *(info.rank_offset + worker for info in parsed for worker in range(workers))]
    assert taken == list(range(parsed[0].world_size))
    assert all((info.master_address, info.master_port) == ("10.0.0.1", 4711) for info in parsed)
    assert all(info.packed for info in parsed)


@pytest.mark.parametrize("bucket_bytes", [700, 2**20])
def test_vllm_finds_its_own_gpu_s_bucket_among_the_handles(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int) -> None:
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    packers = [Packer(CPU, bucket_bytes) for _ in range(2)]
    expected = dict(weights())
    doubled = ((name, 2 * tensor) for name, tensor in weights())
    arrived: list[dict[str, torch.Tensor]] = [{}, {}]
    properties = type("Properties", (), {"uuid": ""})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert IPCWeightTransferEngine.init_info_cls(packed=True).packed

    class Importer:
        """Finds a bucket by what stands for its handle."""

        def rebuild(self, handle: list[Any]) -> torch.Tensor:
            assert handle[6] == 0, "the device is the engine's own"
            return packers[handle[0]].memory

    both = zip(packers[0].buckets(weights()), packers[1].buckets(doubled), strict=True)
    for (contents, _), (others, _) in both:
        handles = [{f"GPU-{number}": (number, *(None,) * 5, 7)} for number in range(2)]
        update = packed_update(list(zip((contents, others), handles, strict=True)))
        info = IPCWeightTransferEngine.update_info_cls(**update.info)
        for number in range(2):
            properties.uuid = f"GPU-{number}"  # type: ignore[attr-defined]
            taken = packed_tensor.packed_ipc_consumer(
                info.ipc_handles, info.names, info.shapes, info.dtype_names, info.tensor_sizes, 0, Importer()
            )
            arrived[number] |= dict(taken)
    assert arrived[0].keys() == arrived[1].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(arrived[0][name], tensor)
        assert torch.equal(arrived[1][name], 2 * tensor)


@pytest.mark.parametrize(
    ("engines", "workers", "ranks"), [((0, 1, 2), 1, (0, 1, 2)), ((0, 1), 2, (0, 1, 2, 3)), ((1,), 3, (3, 4, 5))]
)
def test_every_worker_of_an_engine_has_a_handle_for_its_gpu(
    monkeypatch: pytest.MonkeyPatch, engines: tuple[int, ...], workers: int, ranks: tuple[int, ...]
) -> None:
    """Also where one engine alone, which has restarted, takes the weights."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

    class Policy:
        """Its process of rank r is on GPU r."""

        def sent(self, send: Any, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False) -> Iterator[Any]:
            assert (send, arguments, adapter) == (exported, (), False)
            for contents, _ in Packer(CPU).buckets(weights()):
                yield [(contents, {f"GPU-{rank}": (rank,)}) for rank in ranks]

        def address(self) -> tuple[str, int]:
            raise AssertionError("nobody has to find it")

        def parts(self) -> int:
            return 0

        def sent_parts(self, send: Any, *arguments: Any) -> Iterator[list[Any]]:
            raise AssertionError("each GPU gets all weights")

    stream = cuda_ipc(cast(PolicyModel, Policy()), [(number, 0) for number in engines], 1, workers=workers)
    assert stream.infos == [{"packed": True}] * len(engines)
    (update,) = stream.updates
    info = IPCWeightTransferEngine.update_info_cls(**update.info)
    assert info.ipc_handles == {f"GPU-{rank}": (rank,) for rank in ranks}
    assert info.names == [name for name, _ in weights()]


@pytest.mark.parametrize(
    ("variables", "fixed"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"},
            "expandable_segments:False,max_split_size_mb:512",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments: True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
            "expandable_segments:False",
        ),
    ],
    ids=str,
)
def test_a_bucket_is_memory_that_another_process_can_map(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fixed: str | None
) -> None:
    """A container does not let it map those of segments that grow."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls: list[str] = []
    empty = torch.empty

    def allocated(*size: Any, **settings: Any) -> torch.Tensor:
        calls.append("allocation")
        return empty(*size, **settings)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(torch, "empty", allocated)
    packer = Packer(CPU, bucket_bytes=8)
    (options,) = [variables[name] for name in list(variables)[:1]] or [""]
    once = ["allocation"] if fixed is None else [fixed, "allocation", options]
    assert calls == once
    assert len(list(packer.buckets(iter([("large", torch.zeros(9))])))) == 1
    assert calls == once * 2


@pytest.mark.parametrize("backend", [backend for backend in SyncBackend if backend is not SyncBackend.AUTO])
def test_an_engine_is_started_with_the_backend_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, backend: SyncBackend
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    started: list[Any] = []
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments, **_: started.append(arguments))
    start(backend, model=str(tiny_model_dir), max_num_seqs=8)
    (arguments,) = started
    name = arguments.weight_transfer_config.backend
    assert name == VLLM_BACKENDS[backend]
    assert name in WeightTransferEngineFactory._registry


def test_the_group_s_error_ends_the_send_and_no_later_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Wire):
        def send(self, memory: torch.Tensor) -> None:
            raise EngineError("The engines took more than 120 s to take a bucket of weights by NCCL.")

    monkeypatch.setattr(nccl, "_group", Broken())
    updates = nccl.broadcast(weights(), None)
    next(updates)
    with pytest.raises(EngineError, match="take a bucket"):
        next(updates)
    assert next(updates, None) is None
