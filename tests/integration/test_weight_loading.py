"""A worker of vLLM loads what its share of a model needs, from where the trainer has written it: vLLM's own models and
layers, without its processes; a share is that of one of two ranks of tensor parallelism."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define
from torch import Tensor, nn

from rollgrad.adapters.engines.vllm.layer_loading import LayerLoading
from rollgrad.adapters.engines.vllm.loaders import complete_loaders
from rollgrad.adapters.engines.vllm.plugin import register
from rollgrad.adapters.engines.vllm.weight_receiver import (
    FullBucket,
    ReceiverSettings,
    gpu_receiver_class,
    receiver_class,
)
from rollgrad.adapters.models.torch.sent_names import sent_buffers, sent_name, sent_weights
from rollgrad.adapters.weights.delta import changes
from rollgrad.adapters.weights.disk import write
from rollgrad.adapters.weights.gpu_buckets import Contents, Packer
from rollgrad.adapters.weights.shared_buckets import Run, SharedMemory, fill, fill_part_at
from tests.tiny_models import make_tiny_tokenizer, saved, tiny_model

pytestmark = [pytest.mark.slow]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("LlamaForCausalLM", {"tie_word_embeddings": False, "head_dim": 32, "attention_bias": True}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 32, "vocab_size": 301}),
    "turned": ("GPT2LMHeadModel", {"n_positions": 64, "hidden_size": 128}),
    "mixture": ("Qwen3MoeForCausalLM", {"head_dim": 32, "hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2}),
    "biased mixture": (
        "GptOssForCausalLM",
        {"head_dim": 32, "hidden_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "renamed": ("MixtralForCausalLM", {"head_dim": 32, "hidden_size": 64, "num_local_experts": 4}),
    "latent": (
        "DeepseekV3ForCausalLM",
        {
            **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
            **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32),
            **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
            **dict.fromkeys(("num_key_value_heads", "n_routed_experts"), 4),
            "qk_rope_head_dim": 16,
            "num_experts_per_tok": 2,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
}
"""One class of transformers and its settings; a vocabulary of 301 is padded, the matrices of GPT-2 are turned, the
experts of a mixture are packed for their kernel, those of gpt-oss are turned by its loader, which takes their biases
for the first rank alone, in memory those of Mixtral have other names than in files, and those of DeepSeek are loaded
one by one, beside latent attention, which takes matrices out of its weights."""

CPU = torch.device("cpu")
SHARES = [(0, 1), pytest.param(0, 2, marks=pytest.mark.wide), (1, 2)]


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, settings = MODELS[request.param]
    tokenizer = make_tiny_tokenizer()
    return saved(tiny_model(name, tokenizer, **settings), tokenizer, tmp_path_factory.mktemp(request.param))


def trained(directory: Path, seed: int) -> dict[str, Tensor]:
    """Weights of the trainer, by the names under which it sends them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    sent, generator = sent_name(model), torch.Generator().manual_seed(seed)
    all_sent = {sent(name): tensor for name, tensor in model.named_parameters()} | sent_buffers(model)
    return {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in all_sent.items()}


@define
class Worker:
    """One rank of an engine: vLLM's model, and what takes weights into it."""

    config: Any
    model: Any

    @contextmanager
    def within(self) -> Iterator[None]:
        """vLLM's settings, as its worker has them in the calls of a transfer."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            yield

    def load(self, weights: dict[str, Tensor]) -> "Worker":
        """As from a checkpoint, by vLLM itself."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with self.within():
            self.model.load_weights(iter(weights.items()))
            if self.config.model_config.quantization is not None:
                finalize_layerwise_processing(self.model, self.config.model_config)
            process_weights_after_loading(self.model, self.config.model_config, CPU)
        return self

    def receiver(self) -> Any:
        return receiver_class()(None, self.config, CPU, self.model)

    def computed(self) -> dict[str, Tensor]:
        """Returns all that its kernels read: weights, and products with those that are packed."""
        found = {name: tensor.clone() for name, tensor in self.model.named_parameters() if tensor.numel()}
        for name, layer in self.model.named_modules():
            if (product := getattr(layer, "cpu_linear", None)) is not None:
                names = ("input_size_per_partition", "embedding_dim", "input_size")
                width = next(getattr(layer, name) for name in names if hasattr(layer, name))
                inputs = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(layer.weight.dtype)
                found[f"{name}()"] = product(inputs, layer.weight, None)
        return found


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Any:
    """Returns a function that makes the worker of a rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    def made(rank: int, size: int, **settings: Any) -> Worker:
        group = SimpleNamespace(rank_in_group=rank, world_size=size, rank=rank)
        lone = SimpleNamespace(
            rank_in_group=0,
            world_size=1,
            is_first_rank=True,
            is_last_rank=True,
            device_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0),
        )
        monkeypatch.setattr(parallel_state, "_TP", group)
        for name in ("_PP", "_DP", "_EP", "_PCP"):
            monkeypatch.setattr(parallel_state, name, lone)
        settings = {"dtype": "float32", "enforce_eager": True, "attention_backend": "CPU_MLA", **settings}
        config = EngineArgs(model=str(directory), **settings).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        complete_loaders(model)
        return Worker(config, model)

    return made


def test_vllm_reads_what_is_sent_as_it_reads_files(worker: Any, directory: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    sent = {weight.name: weight.value(lambda parameter: parameter.detach()) for weight in sent_weights(model)}
    sent |= sent_buffers(model)
    expected = worker(0, 1).load(load_file(directory / "model.safetensors")).computed()
    found = worker(0, 1).load(sent).computed()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def messages(weights: dict[str, Tensor], memory: SharedMemory, writers: int) -> Iterator[FullBucket]:
    """The buckets of a push by several processes of the trainer, each of which has a part of each tensor."""

    def runs(writer: int) -> Iterator[Run]:
        for name, tensor in weights.items():
            flat = tensor.reshape(-1)
            most = -(-len(flat) // writers)
            part = flat[writer * most : (writer + 1) * most]
            yield Run(name, tuple(tensor.shape), min(writer * most, len(flat)), part)

    ways = [fill_part_at(runs(w), w, writers, memory.path, memory.bucket_bytes) for w in range(writers)]
    while written := [message for message in [next(way, None) for way in ways] if message is not None]:
        yield FullBucket(bucket=written[0][0], pieces=[piece for _, pieces in written for piece in pieces])
        memory.bucket(written[0][0]).fill_(0xFF)  # what has been taken does not lie in the bucket
    yield FullBucket(last=True)


def push(
    worker: Worker, receiver: Any, weights: dict[str, Tensor], *, writers: int = 1, buckets: int = 10**9, cut: str = ""
) -> None:
    """Pushes weights, the tensor `cut` without its end; after so many `buckets` the push breaks off."""
    memory = SharedMemory(bucket_bytes=8192)
    try:
        with worker.within():
            receiver.init_transfer_engine(ReceiverSettings(memory.path, memory.bucket_bytes))
            receiver.start_weight_update()
            for number, message in enumerate(messages(weights, memory, writers)):
                if number == buckets:
                    break
                for piece in message.pieces:
                    piece["size"] -= 4 * (piece["name"] == cut)
                receiver.receive_weights(message)
            receiver.finish_weight_update()
    finally:
        memory.unlink()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("rank", "size"), SHARES)
def test_a_push_makes_the_engine_that_vllm_makes_of_the_files(
    directory: Path, worker: Any, rank: int, size: int
) -> None:
    expected = worker(rank, size).load(trained(directory, 2)).computed()
    pushed = worker(rank, size).load(trained(directory, 1))
    receiver = pushed.receiver()
    for writers in (1, 2, 3):
        push(pushed, receiver, trained(directory, 1), writers=writers)
        push(pushed, receiver, trained(directory, 2), writers=writers)
        assert_same(pushed.computed(), expected)


class GPU:
    """Stands for the memory of a GPU, in which the trainer's bucket is, and for NCCL, by which a worker gets a copy."""

    uuid = "GPU-7"

    def __init__(self) -> None:
        self.bucket = torch.empty(0, dtype=torch.uint8)
        self.closed = 0

    def rebuild(self, handle: list[Any]) -> Tensor:
        """vLLM's importer maps the bucket by a handle."""
        assert handle == [*range(6), None, 7], "of the worker's own device"
        return self.bucket

    def close(self) -> None:
        self.closed += 1

    def broadcast(self, memory: Tensor, src: int, stream: Any) -> None:
        assert src == 0
        memory.copy_(self.bucket[: len(memory)])

    def update(self, receiver: Any, contents: Contents) -> Any:
        """The message about a bucket, as the receiver parses it."""
        fields = {"names": contents.names, "dtype_names": contents.dtype_names, "shapes": contents.shapes}
        if hasattr(receiver, "_packed_importer"):
            fields |= {"tensor_sizes": contents.tensor_sizes, "ipc_handles": {self.uuid: tuple(range(8))}}
        return receiver.update_info_cls(**fields)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    made = GPU()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return made


def gpu_receiver(worker: Worker, gpu: GPU, backend: str) -> Any:
    """The end of a backend of vLLM's in a worker."""
    made = gpu_receiver_class(backend)
    assert made is not None
    receiver = made(None, worker.config, CPU, worker.model)
    setattr(receiver, {"ipc": "_packed_importer", "nccl": "model_update_group"}[backend], gpu)
    return receiver


def push_on_gpu(worker: Worker, receiver: Any, gpu: GPU, weights: dict[str, Tensor], *, buckets: int = 10**9) -> None:
    """Pushes weights by buckets in a GPU's memory; after so many it breaks off."""
    with worker.within():
        receiver.start_weight_update()
        for number, (contents, memory) in enumerate(Packer(CPU, 8192).buckets(iter(weights.items()))):
            if number == buckets:
                break
            gpu.bucket = memory.clone()
            receiver.receive_weights(gpu.update(receiver, contents))
            gpu.bucket.fill_(0xFF)  # what has been taken does not lie in the bucket
        receiver.finish_weight_update()


@pytest.mark.parametrize(("backend", "rank", "size"), [("ipc", 0, 1), ("ipc", 1, 2), ("nccl", 0, 1)])
def test_a_push_in_a_gpu_s_memory_makes_the_same_engine(
    directory: Path, worker: Any, gpu: GPU, backend: str, rank: int, size: int
) -> None:
    expected = worker(rank, size).load(trained(directory, 2)).computed()
    pushed = worker(rank, size).load(trained(directory, 1))
    receiver = gpu_receiver(pushed, gpu, backend)
    for seed in (3, 2):
        push_on_gpu(pushed, receiver, gpu, trained(directory, seed))
    assert_same(pushed.computed(), expected)
    assert gpu.closed == 2 * (backend == "ipc")


def test_a_push_in_a_gpu_s_memory_that_breaks_off_says_what_lacks(directory: Path, worker: Any, gpu: GPU) -> None:
    expected = worker(0, 1).load(trained(directory, 2)).computed()
    pushed = worker(0, 1).load(trained(directory, 1))
    receiver = gpu_receiver(pushed, gpu, "ipc")
    with pytest.raises(ValueError, match="did not come from the trainer"):
        push_on_gpu(pushed, receiver, gpu, trained(directory, 3), buckets=2)
    receiver.finish_weight_update()  # as the trainer abandons what failed
    push_on_gpu(pushed, receiver, gpu, trained(directory, 2))
    assert_same(pushed.computed(), expected)


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_vllm_makes_these_ends_of_its_backends(backend: str) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    config: Any = SimpleNamespace(backend=backend)
    vllm_config: Any = SimpleNamespace(model_config=None, parallel_config=None)
    made = WeightTransferEngineFactory.create_engine(config, vllm_config, CPU, nn.Module())
    expected = gpu_receiver_class(backend)
    assert expected is not None
    assert type(made).__mro__[1:] == expected.__mro__[1:]


def test_a_worker_whose_gpu_has_no_bucket_says_so(gpu: GPU) -> None:
    config: Any = SimpleNamespace(model_config=None, parallel_config=None)
    receiver = gpu_receiver(Worker(config, None), gpu, "ipc")
    gpu.uuid = "GPU-8"
    update = gpu.update(receiver, Contents())
    gpu.uuid = "GPU-9"
    with pytest.raises(ValueError, match=r"no bucket on GPU GPU-9, but on \['GPU-8'\]"):
        receiver.receive_weights(update)


@pytest.mark.parametrize(("rank", "size"), SHARES[1:])
def test_a_rank_reads_what_its_share_of_a_model_has(directory: Path, worker: Any, rank: int, size: int) -> None:
    weights = trained(directory, 1)
    pushed = worker(rank, size).load(weights)
    receiver = pushed.receiver()
    push(pushed, receiver, weights)
    plan = receiver._loading._plan
    for name, tensor in weights.items():
        copies = plan.loading(name, tensor.shape).copies
        assert copies is not None, name
        read = sum(torch.Size(copy.source.shape).numel() for copy in copies if copy.source is not None)
        gates = ("mlp.gate.", "moe.gate.", "mlp.router.")
        whole = any(part in name for part in ("norm", "ln_", "wpe", "o_proj.bias", "c_proj.bias", "_a_proj", *gates))
        if "embed_tokens" in name or "lm_head" in name or "wte" in name:  # padded vocabularies are divided unequally
            assert read < 0.7 * tensor.numel(), name
        elif "down_proj_bias" in name:  # is added once, by the first rank
            assert read == (0 if rank else tensor.numel()), name
        else:
            assert read == tensor.numel() // (1 if whole else size), name


@pytest.mark.parametrize("buckets", [1, 4, 9])
def test_a_push_that_breaks_off_leaves_an_engine_that_the_next_one_makes_whole(
    directory: Path, worker: Any, buckets: int
) -> None:
    expected = worker(1, 2).load(trained(directory, 2)).computed()
    pushed = worker(1, 2).load(trained(directory, 1))
    receiver = pushed.receiver()
    push(pushed, receiver, trained(directory, 3), buckets=buckets)
    pushed.computed()
    with pushed.within():
        receiver.start_weight_update()  # and is left there by a trainer that died
    push(pushed, receiver, trained(directory, 2), writers=2)
    assert_same(pushed.computed(), expected)


@pytest.mark.parametrize("lacks", ["a tensor", "the end of one"])
def test_what_does_not_come_is_noticed(directory: Path, worker: Any, lacks: str) -> None:
    weights = trained(directory, 1)
    pushed = worker(0, 1).load(weights)
    receiver = pushed.receiver()
    push(pushed, receiver, weights)
    name = next(name for name in weights if "norm" in name or "ln_1" in name)
    if lacks == "a tensor":
        del weights[name]
    with pytest.raises(ValueError, match="did not come from the trainer"):
        push(pushed, receiver, weights, cut=name)


@pytest.mark.parametrize(("rank", "size"), SHARES)
@pytest.mark.parametrize("pushed_before", [True, False], ids=["later", "at first"])
def test_the_missing_part_of_a_layer_of_several_tensors_is_named(
    directory: Path, worker: Any, rank: int, size: int, pushed_before: bool
) -> None:
    weights = trained(directory, 1)
    parts = ("k_proj.weight", "up_proj.weight")
    missing = [name for part in parts for name in [one for one in weights if one.endswith(part)][:1]]
    assert missing or not any("q_proj" in name for name in weights)  # of whose layers none has several tensors
    pushed = worker(rank, size).load(weights)
    receiver = pushed.receiver()
    if pushed_before:
        push(pushed, receiver, weights)
    for name in missing:
        lacks_one = {other: tensor for other, tensor in weights.items() if other != name}
        with pytest.raises(ValueError, match=rf"did not come from the trainer: \['{name}'\]"):
            push(pushed, receiver, lacks_one)
    push(pushed, receiver, weights)


def test_quantised_layers_are_made_by_vllm_from_whole_tensors(directory: Path, worker: Any) -> None:
    expected = worker(0, 2).load(trained(directory, 2)).computed()
    pushed = worker(0, 2).load(trained(directory, 1))
    pushed.config.model_config.quantization = "so to speak"
    receiver = pushed.receiver()
    push(pushed, receiver, trained(directory, 2), writers=2)
    assert not receiver._loading._plan._known
    found = pushed.computed()
    if pushed.config.model_config.hf_config.model_type == "gpt_oss":
        # vLLM's loader writes to these where its own reloading has nothing; log-probs after the push tell it.
        lost = {name for name in expected if "experts" in name or "sinks" in name}
        found, expected = ({n: x for n, x in each.items() if n not in lost} for each in (found, expected))
    assert_same(found, expected)


@pytest.mark.parametrize("directory", ["untied"], indirect=True)
def test_a_push_makes_the_engine_in_eight_bits_that_vllm_makes_of_the_files(directory: Path, worker: Any) -> None:
    """As vLLM quantises while it loads; by channels is the one way that it has on every processor."""

    def loaded(seed: int) -> Worker:
        quantized: Worker = worker(0, 1, dtype="bfloat16", quantization="fp8_per_channel")
        return quantized.load(sent[seed])

    def computed(worker: Worker) -> dict[str, Tensor]:
        return {name: tensor.float() for name, tensor in worker.computed().items()}

    sent = [{name: tensor.bfloat16() for name, tensor in trained(directory, seed).items()} for seed in range(2)]
    expected, pushed = loaded(1), loaded(0)
    eighths = [name for name, tensor in expected.model.named_parameters() if tensor.dtype == torch.float8_e4m3fn]
    assert len(eighths) == 2 * 4  # of each layer qkv, o, gate and up, down
    before = computed(pushed)
    receiver = pushed.receiver()
    push(pushed, receiver, sent[1], writers=2)
    assert_same(computed(pushed), computed(expected))
    push(pushed, receiver, sent[0], writers=2)
    assert_same(computed(pushed), before)
    assert not any(torch.equal(before[name], computed(expected)[name]) for name in eighths)


def test_files_are_read_as_far_as_a_share_needs(directory: Path, worker: Any, tmp_path: Path) -> None:
    expected = worker(1, 2).load(trained(directory, 2)).computed()
    pushed = worker(1, 2).load(trained(directory, 1))
    receiver = pushed.receiver()
    with pushed.within():
        receiver.start_weight_update()
        for update in write(iter(trained(directory, 2).items()), str(tmp_path / "weights"), 2**15):
            receiver.receive_weights(FullBucket(**update.info))
        receiver.receive_weights(FullBucket(last=True))
        receiver.finish_weight_update()
    assert_same(pushed.computed(), expected)


def changed(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights after a step: of every third tensor nothing is new, of the others one element of a hundred, or, of one,
    all."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number, (name, tensor) in enumerate(weights.items()):
        share = (0.0, 0.01, 0.01 if number != 4 else 1.0)[number % 3]
        new = torch.randn(tensor.shape, generator=generator) * 0.1
        found[name] = torch.where(torch.rand(tensor.shape, generator=generator) < share, new, tensor)
    return found


def push_changes(
    worker: Worker, receiver: Any, weights: dict[str, Tensor], base: str | None, key: str, *, buckets: int = 10**9
) -> int:
    """Pushes what changed since the transfer `base`, or all weights without one; returns the bytes that came."""
    memory, came = SharedMemory(bucket_bytes=8192), 0
    try:
        with worker.within():
            receiver.init_transfer_engine(ReceiverSettings(memory.path, memory.bucket_bytes))
            receiver.start_weight_update()
            for number, (bucket, pieces) in enumerate(fill(changes(iter(weights.items()), base, key), memory)):
                if number < buckets:
                    receiver.receive_weights(FullBucket(bucket=bucket, pieces=pieces, base=base, key=key))
                    memory.bucket(bucket).fill_(0xFF)
                    came += sum(piece["size"] for piece in pieces)
            if buckets == 10**9:
                receiver.receive_weights(FullBucket(last=True, base=base, key=key))
            receiver.finish_weight_update()
    finally:
        memory.unlink()
    return came


@pytest.mark.parametrize(("rank", "size"), SHARES)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "as loaded"])
def test_changes_make_the_engine_that_vllm_makes_of_the_files(
    directory: Path, worker: Any, rank: int, size: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where kernels read what is loaded, as those of a GPU do."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    if not packed:
        elsewhere = SimpleNamespace(is_cpu=lambda: False, is_xpu=lambda: False, is_cuda=lambda: False)
        monkeypatch.setattr(linear, "current_platform", elsewhere)
        monkeypatch.setattr(vocab_parallel_embedding, "current_platform", elsewhere)
    weights = trained(directory, 1)
    pushed = worker(rank, size).load(trained(directory, 3))
    receiver = pushed.receiver()
    whole = push_changes(pushed, receiver, weights, None, "0")
    assert whole == sum(tensor.nbytes for tensor in weights.values())
    for number in range(1, 4):
        weights = changed(weights, number)
        came = push_changes(pushed, receiver, weights, str(number - 1), str(number))
        assert 0 < came < whole / 3
        assert_same(pushed.computed(), worker(rank, size).load(weights).computed())
    kept = receiver._loading._kept
    assert any("proj" in name or "c_attn" in name for name, layer in pushed.model.named_modules() if layer in kept) is (
        packed
    )


def test_changes_of_other_weights_are_refused_and_all_weights_heal(directory: Path, worker: Any) -> None:
    """Others are those that the engine has missed, has not wholly, or had before it was restarted."""
    first, second = trained(directory, 1), changed(trained(directory, 1), 1)
    pushed = worker(1, 2).load(trained(directory, 3))
    receiver = pushed.receiver()
    with pytest.raises(ValueError, match="changes of the weights of transfer 0 came, but here are those of None"):
        push_changes(pushed, receiver, first, "0", "1")
    push_changes(pushed, receiver, first, None, "0")
    push_changes(pushed, receiver, second, "0", "1", buckets=1)
    with pytest.raises(ValueError, match="transfer 1 came, but here are those of None"):
        push_changes(pushed, receiver, second, "1", "2")
    push(pushed, receiver, first)
    with pytest.raises(ValueError, match="transfer 2 came, but here are those of None"):
        push_changes(pushed, receiver, second, "2", "3")
    push_changes(pushed, receiver, first, None, "4")
    push_changes(pushed, receiver, second, "4", "5")
    assert_same(pushed.computed(), worker(1, 2).load(second).computed())


def test_weights_that_changes_of_a_quantised_engine_cannot_reach_are_named(directory: Path, worker: Any) -> None:
    pushed = worker(0, 1).load(trained(directory, 1))
    pushed.config.model_config.quantization = "so to speak"
    with pytest.raises(ValueError, match=r"their changes alone cannot be loaded: \[.*leave --vllm.sync_delta out"):
        push_changes(pushed, pushed.receiver(), trained(directory, 2), None, "0")


class Scaled(nn.Module):
    """A layer in vLLM's manner, whose checkpoint has a `weight`, and a `scale` that is no parameter here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("made", torch.full((3,), 7.0))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        loaded = set()
        for name, tensor in weights:
            own = getattr(self, name)
            getattr(own, "weight_loader", default_weight_loader)(own, tensor)
            loaded.add(name)
        return loaded


@pytest.mark.parametrize("order", [("weight", "scale"), ("scale", "weight")], ids=" then ".join)
def test_buffers_of_layers_that_are_written_in_place_are_loaded_too(order: tuple[str, ...]) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, record_metadata_for_reloading

    layer = Scaled()
    record_metadata_for_reloading(layer)
    read_by_kernels = {"weight": layer.weight, **dict(layer.named_buffers())}
    loading = LayerLoading(layer, CPU, planned=True)
    for step in (1.0, 2.0):
        sent = {"weight": torch.arange(6) + step, "scale": torch.tensor([step, -step])}
        loading.begin()
        for name in order:
            facts = {"name": name, "dtype": "float32", "shape": list(sent[name].shape), "offset": 0, "begin": 0}
            memory = sent[name].view(torch.uint8).clone()
            assert loading.take(memory, [{**facts, "size": len(memory)}]) == {name}
        assert loading.whole()
        loading.end(well=True)
        finalize_layerwise_reload(layer, None)
        for name, tensor in read_by_kernels.items():
            assert getattr(layer, name) is tensor
            assert torch.equal(tensor, sent.get(name, torch.full((3,), 7.0))), name
