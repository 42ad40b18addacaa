"""Activations that are computed again, and inputs of layers that wait elsewhere, change no gradient by a bit."""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rollgrad.adapters.models.torch import recomputation
from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.layers.attention import install_attention
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.offloading import OffloadedInputs, PlainTransfers, StreamTransfers
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.recomputation import Recomputation
from rollgrad.adapters.models.torch.rewards.trained_reward import TorchReward
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.rules import setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing, LoraConfig
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import LossOutput
from rollgrad.testing.agent_executor import make_trajectory
from tests.fakes import cluster, image_sequences
from tests.strict_streams import StrictStreams
from tests.tiny_architectures import tiny_model
from tests.tiny_vision import codec_of, tiny_vlm

CPU = torch.device("cpu")
FLAG = "--actor.model_name_or_path"
WAYS = [(kind, offloads) for kind in (Checkpointing.FULL, Checkpointing.SELECTIVE) for offloads in (False, True)]


def load(path: Path) -> Any:
    return load_causal_lm(str(path), dtype=torch.float32, device=CPU, flag=FLAG)


def batch() -> PackedBatch:
    """Two prompts, each shared by three replies."""
    packed = pack(
        [
            make_trajectory(
                [3 + 5 * group + token for token in range(9)],
                [7 + 11 * sample + token for token in range(4 + 3 * sample)],
                group_id=group,
                sample_id=sample,
            )
            for group, sample in itertools.product(range(2), range(3))
        ]
    )
    return evolve(packed, loss_weights_N=torch.where(packed.action_mask_N, 0.1, 0.0))


def gradients(
    model: Any, packed: PackedBatch, kind: Checkpointing, *, offloads: bool = False, passes: int = 1, **settings: Any
) -> dict[str, Tensor]:
    """Gradients of a loss of so many forward passes, whose backward passes follow all of them."""
    model.zero_grad()
    way = Recomputation(model, AdapterDropout(model), kind, offloads=offloads, **settings)
    module = PackedLM(model)
    with way.during(model):
        loss = torch.zeros(())
        for _ in range(passes):
            logprobs_A, entropy_A = module(packed)[:2]
            loss = loss + (torch.linspace(-1, 1, len(logprobs_A)) * (logprobs_A + 0.3 * entropy_A)).sum()
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# With experts; with experts that are drawn in train mode; with linear attention; with convolutions; with sinks;
# with biases of experts; with capped scores and norms after products; with biases and learned positions; computed
# padded, the last with layers of several widths.
@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "qwen3_moe",
        "phimoe",
        "qwen3_5_text",
        "lfm2",
        "granite_swa",
        "gpt_oss",
        "gemma2",
        "gpt2",
        "bloom",
        "blt",
    ],
)
def test_gradients_are_the_same_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    expected = gradients(load(tmp_path), batch(), Checkpointing.OFF)
    assert len(expected) > 10
    for kind, offloads in WAYS:
        found = gradients(load(tmp_path), batch(), kind, offloads=offloads)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), (kind, offloads)


def test_models_that_cannot_compute_again_are_refused(tmp_path: Path) -> None:
    tiny_model("jetmoe").save_pretrained(tmp_path)
    model = load(tmp_path)
    Recomputation(model, AdapterDropout(model), Checkpointing.OFF)
    with pytest.raises(ConfigurationError, match=r"full.*JetMoeForCausalLM: set --actor.gradient_checkpointing off"):
        Recomputation(model, AdapterDropout(model), Checkpointing.FULL)


def test_gradients_over_images_are_the_same_bit_for_bit() -> None:
    def made() -> Any:
        torch.manual_seed(1)
        return tiny_vlm("qwen2_5_vl")

    model, processor = made()
    packed = image_sequences.batch(codec_of(processor), several=True)
    found = []
    for kind, offloads in [(Checkpointing.OFF, False), *WAYS]:
        model, _ = made()
        install_attention(model)
        found.append(gradients(model, packed, kind, offloads=offloads))
    assert any("visual" in name for name in found[0])
    for other in found[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in found[0].items())


def test_selective_checkpointing_multiplies_nothing_wide_again(tiny_model_dir: Path) -> None:
    counts = {}
    for kind in Checkpointing:
        model = load(tiny_model_dir)
        with FlopCounterMode(display=False) as counter:
            gradients(model, batch(), kind)
        counts[kind] = counter.get_total_flops()
    assert counts[Checkpointing.SELECTIVE] == counts[Checkpointing.OFF] < counts[Checkpointing.FULL]


class Products(TorchDispatchMode):
    """Counts products of matrices by their inner dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.inner[args[0].shape[1]] += 1
        return func(*args, **(kwargs or {}))


def test_products_of_adapters_are_computed_again(tiny_model_dir: Path) -> None:
    """To keep results of their narrow factors would double what is kept."""
    found = {}
    for kind in Checkpointing:
        model = load(tiny_model_dir)
        add_lora(model, LoraConfig(rank=3), seed=1)
        with Products() as products:
            gradients(model, batch(), kind)
        found[kind] = products.inner
    adapters, layers = 7, 2
    again = found[Checkpointing.SELECTIVE] - found[Checkpointing.OFF]
    # transformers has the embeddings' gradients computed, too, through the first layer's q, k and v and their adapters.
    assert adapters * layers - 3 <= again[3] <= adapters * layers + 3
    assert sum(again.values()) - again[3] <= 6
    assert sum((found[Checkpointing.FULL] - found[Checkpointing.OFF]).values()) > 2 * adapters * layers


def moved(made: Any, packed: PackedBatch, objective: Callable[..., LossOutput]) -> dict[str, Tensor]:
    """The moments after an optimizer step in two micro-batches."""
    made.update([packed.select([0, 1, 2]), packed.select([3, 4, 5])], objective)
    return {name: moments["exp_avg"] for name, moments in made.state_dict()["moments"].items()}


def squares(values_N: Tensor, part: PackedBatch) -> LossOutput:
    return LossOutput(loss=(values_N - 0.5).square().sum() / part.token_count)


@pytest.mark.parametrize(
    ("kind", "objective"), [(TorchPolicy, cluster.likelihood), (TorchValue, squares), (TorchReward, squares)]
)
def test_every_trained_model_steps_the_same(tiny_model_dir: Path, kind: Any, objective: Any) -> None:
    found = []
    for checkpointing, offloads in [(Checkpointing.OFF, False), *WAYS]:
        settings = {} if kind is TorchPolicy else {"head": {"weight": torch.linspace(-1, 1, 64)[None]}}
        made = kind(
            load(tiny_model_dir),
            load_tokenizer(str(tiny_model_dir), flag=FLAG),
            OptimizerSettings(lr=1e-3),
            gradient_checkpointing=checkpointing,
            offload_activations=offloads,
            **settings,
        )
        found.append(moved(made, batch(), objective))
    assert any(bool(moment.any()) for moment in found[0].values())
    for other in found[1:]:
        assert all(torch.equal(other[name], moment) for name, moment in found[0].items())


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """The memory of the machine that inputs were given."""
    made: list[weakref.ref[Tensor]] = []
    room = PlainTransfers.room

    def noted(self: PlainTransfers, tensor: Tensor) -> Tensor:
        found = room(self, tensor)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(PlainTransfers, "room", noted)
    return made


@pytest.mark.parametrize("place", ["forward", "backward", "loss"])
def test_an_error_leaves_no_input_behind(tiny_model_dir: Path, rooms: list[weakref.ref[Tensor]], place: str) -> None:
    policy = TorchPolicy(
        load(tiny_model_dir),
        None,
        OptimizerSettings(lr=1e-3),
        gradient_checkpointing=Checkpointing.FULL,
        offload_activations=True,
    )

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    layer = policy.module.model.layers[0 if place == "backward" else 1].mlp
    if place == "backward":
        handle = layer.register_full_backward_hook(fails)
    elif place == "forward":
        handle = layer.register_forward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        policy.update([batch()], fails if place == "loss" else cluster.likelihood)
    gc.collect()
    assert len(rooms) == 2, "an input of each layer"
    assert all(room() is None for room in rooms)
    assert policy._recomputation._offloaded is not None
    assert not policy._recomputation._offloaded._here
    if place != "loss":
        handle.remove()
    assert policy.update([batch()], cluster.likelihood)["grad_norm"] > 0


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("passes", [1, 2])
def test_streams_wait_for_each_other_where_they_must(layers: int, passes: int, tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=layers).save_pretrained(tmp_path)
    expected = gradients(load(tmp_path), batch(), Checkpointing.OFF, passes=passes)
    streams = StrictStreams()
    model, packed = load(tmp_path), batch()
    with streams:
        found = gradients(
            model,
            packed,
            Checkpointing.FULL,
            offloads=True,
            passes=passes,
            transfers=lambda device: StreamTransfers(device, streams),
        )
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert not streams.refused
    # Each input goes; each but the last of the last pass comes back.
    assert streams.copies == 2 * layers * passes - 1


class WithoutWaiting(StreamTransfers):
    """Forgets to wait for the end of a copy."""

    def wait(self, copied: Any) -> None:
        pass


class WithoutOrder(StreamTransfers):
    """Begins copies before what they read was computed."""

    def copy(self, target: Tensor, source: Tensor) -> Any:
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class Forgetful(OffloadedInputs):
    """Frees memory whose copies may not have ended."""

    def _let_go(self) -> None:
        for saved in self._here:
            saved.here = None
        self._here.clear()


@pytest.mark.parametrize("kind", [WithoutWaiting, WithoutOrder])
def test_transfers_without_order_are_found(tiny_model_dir: Path, kind: Any) -> None:
    streams, model, packed = StrictStreams(), load(tiny_model_dir), batch()
    with pytest.raises(AssertionError, match="does not wait for what another stream does"), streams:
        gradients(model, packed, Checkpointing.FULL, offloads=True, transfers=lambda device: kind(device, streams))


def test_memory_that_is_freed_too_early_is_found(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "OffloadedInputs", Forgetful)
    streams, model, packed = StrictStreams(), load(tiny_model_dir), batch()
    with streams:
        gradients(
            model,
            packed,
            Checkpointing.FULL,
            offloads=True,
            transfers=lambda device: StreamTransfers(device, streams),
        )
    assert streams.refused


@pytest.mark.parametrize(
    ("changes", "name", "problem"),
    [
        ({"actor.compile": True}, "actor.gradient_checkpointing", "inside of compiled layers"),
        ({"cluster.enable": True, "ds.zero_stage": 3}, "actor.gradient_checkpointing", "fetches weights in the midst"),
        (
            {"cluster.enable": True, "ds.tensor_parallel_size": 2, "actor.num_gpus_per_node": 2},
            "actor.gradient_checkpointing",
            "adds up kept results in place",
        ),
        ({"actor.gradient_checkpointing": Checkpointing.OFF}, "actor.offload_activations", "keeps what each operation"),
    ],
)
def test_what_does_not_combine_is_refused_by_name(changes: dict[str, Any], name: str, problem: str) -> None:
    config = RLConfig()
    config.actor.gradient_checkpointing, config.actor.offload_activations = Checkpointing.SELECTIVE, True
    for setting, value in changes.items():
        section, _, key = setting.rpartition(".")
        setattr(attrgetter(section)(config), key, value)
    [found] = [each for each in map(str, setting_errors(config)) if each.startswith(f"{name} is ")]
    assert problem in found
    assert found.endswith(f"set --actor.gradient_checkpointing full, or leave --{name} out.") or "full, or" in found
    config.actor.gradient_checkpointing = Checkpointing.FULL
    assert not any(each.startswith(f"{name} is ") for each in map(str, setting_errors(config)))
