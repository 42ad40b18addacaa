"""With adapters, too, every engine samples what the trainer computes, and whole runs end in a plain model."""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import rollgrad
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.weights import CopiedWeights, SharedWeights
from rollgrad.adapters.engines.vllm import lora as adapter
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.loading.quantised import is_quantised
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.weights.shared_memory import shared_memory_adapter
from rollgrad.application.settings.rules import validate
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig, LoraSync
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import SyncBackend
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.errors import ConfigurationError, EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine
from rollgrad.domain.ports.weight_channel import WeightChannel
from rollgrad.entrypoints.composition.engines import vllm_settings, weight_backend_kind
from rollgrad.entrypoints.composition.models import make_actor_model, make_reference_model, make_trained_actor
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.reward_source import FakeRewardSource
from tests.adapted_models import plain
from tests.caught_requests import paused
from tests.example_runs import logged
from tests.integration.test_vllm_engine import kept_scores
from tests.one_reply import PROMPT, learn, scores
from tests.scripts import ScriptHost
from tests.tiny_architectures import tiny_model as tiny_architecture
from tests.tiny_models import LONG, SHARE, saved

pytestmark = pytest.mark.asyncio(loop_scope="session")  # vLLM serves all tests
FLAG = "--actor.model_name_or_path"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
VLLM = [pytest.param(way, marks=pytest.mark.slow) for way in ("vllm", "vllm_4bit", "vllm_adapter") if HAS_VLLM]
LORA = LoraConfig(rank=4)

TOLERANCE = 1e-4
"""Largest difference of a float32 log-prob: products are summed in another order, no more."""

ON_A_GPU = torch.cuda.is_available()
ADAPTED = torch.bfloat16 if ON_A_GPU else torch.float32
"""Number format in which vLLM computes adapters beside the weights: on a GPU in 16 bits alone."""
ADAPTED_TOLERANCE = 0.1 if ON_A_GPU else TOLERANCE
"""Largest difference of its log-probs; numbers of bfloat16 have 8 bits."""

Parts = tuple[TorchPolicy, RolloutEngine, WeightChannel]


def loaded(path: Path, *, load_in_4bit: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    cpu = torch.device("cpu")
    return load_causal_lm(str(path), dtype=dtype, device=cpu, flag=FLAG, load_in_4bit=load_in_4bit)


@pytest.fixture(scope="module")
def adapter_engine(wide_headed_model_dir: Path, vllm_host: ScriptHost) -> Iterator[Any]:
    """vLLM that takes adapters alone."""
    from rollgrad.adapters.engines.vllm.engine import VLLMEngine

    dtype = str(ADAPTED).removeprefix("torch.")
    engine = VLLMEngine(
        str(wide_headed_model_dir),
        eos_token_ids=(),
        dtype=dtype,
        max_tokens=512,
        max_batch_size=8,
        memory_fraction=SHARE,
        lora=LORA,
    )
    yield engine
    engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def running_adapter_engine(adapter_engine: Any) -> AsyncIterator[Any]:
    """Requests that a test left have ended afterwards."""
    yield adapter_engine
    await adapter_engine.pause(PauseMode.ABORT)
    await adapter_engine.resume()


@pytest_asyncio.fixture(loop_scope="session")
async def channel(vllm_engine: Any, wide_headed_model_dir: Path) -> AsyncIterator[Any]:
    """Afterwards the engine has the weights of the checkpoint again."""
    from rollgrad.adapters.weights.channel import EngineWeights

    channel = EngineWeights(vllm_engine)
    yield channel
    tokenizer = load_tokenizer(str(wide_headed_model_dir), flag=FLAG)
    await channel.push(TorchPolicy(loaded(wide_headed_model_dir), tokenizer, OptimizerSettings(lr=0.0)), 0)


@pytest.fixture(params=["shared", "shared_4bit", "copied", "copied_4bit", *VLLM])
def parts(request: pytest.FixtureRequest, wide_headed_model_dir: Path) -> Iterator[Parts]:
    """A policy with adapters, whose head is tied, and an engine. Afterwards the engine has the checkpoint's weights."""
    way, in_4bit, _ = request.param.partition("_4bit")
    dtype = ADAPTED if way == "vllm_adapter" else torch.float32
    model = loaded(wide_headed_model_dir, load_in_4bit=bool(in_4bit), dtype=dtype)
    add_lora(model, LORA, seed=0)
    tokenizer = load_tokenizer(str(wide_headed_model_dir), flag=FLAG)
    policy = TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.02))
    if way == "vllm_adapter":
        from rollgrad.adapters.weights.channel import EngineWeights

        with_adapter = request.getfixturevalue("running_adapter_engine")
        yield policy, with_adapter, EngineWeights(with_adapter, backend=shared_memory_adapter)
    elif way == "vllm":
        channel = request.getfixturevalue("channel")
        yield policy, request.getfixturevalue("vllm_engine"), channel
    elif way == "copied":
        copied = EmbeddedEngine(loaded(wide_headed_model_dir), eos_token_ids=())
        yield policy, copied, CopiedWeights(copied)
    else:
        shared = EmbeddedEngine(model, eos_token_ids=())
        yield policy, shared, SharedWeights(shared)


def ask(seed: int, new_tokens: int, prompt: tuple[int, ...] = PROMPT) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=new_tokens, seed=seed))


async def gaps(
    policy: TorchPolicy, engine: RolloutEngine, version: int, prompt: tuple[int, ...] = PROMPT
) -> list[float]:
    """Trainer's log-probs less the engine's, of what the engine samples for several requests at once."""

    found: list[float] = []
    for generation in await asyncio.gather(*(engine.generate(ask(seed, 16, prompt)) for seed in range(4))):
        assert set(generation.versions) == {version}
        found += (
            torch.tensor(scores(policy, prompt, generation.token_ids)) - torch.tensor(generation.logprobs)
        ).tolist()
    return found


needs_vllm = pytest.mark.parametrize("parts", VLLM[2:], indirect=True)


@needs_vllm
async def test_before_the_first_push_vllm_samples_as_with_fresh_adapters(parts: Parts) -> None:
    """It would die of an adapter without layers. The first test with this engine, which has taken none."""
    policy, engine, _ = parts
    assert max(map(abs, await gaps(policy, engine, 0))) < ADAPTED_TOLERANCE


async def test_the_engine_samples_what_the_trainer_computes(parts: Parts) -> None:
    policy, engine, channel = parts
    before = policy.score(pack([make_trajectory(PROMPT, [7, 8, 9])])).logprobs_N
    for version in (1, 2, 3):
        if version > 1:  # fresh adapters first
            learn(policy)
        await channel.push(policy, version)
        assert max(map(abs, await gaps(policy, engine, version))) < ADAPTED_TOLERANCE
    after = policy.score(pack([make_trajectory(PROMPT, [7, 8, 9])])).logprobs_N
    assert (after - before).abs().max() > 0.5, "the adapters have learnt"


"""Settings of the engine that takes adapters alone."""


@needs_vllm
async def test_what_is_sent_is_the_adapter_and_no_old_keys_are_used(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The prompt fills blocks of the prefix cache."""
    policy, engine, channel = parts
    monkeypatch.setattr(adapter, "DIRECTORY", tmp_path)
    long = tuple(20 + index % 200 for index in range(300))
    for version in (11, 12):
        learn(policy)
        moved = await channel.push(policy, version)
        assert moved["bytes"] == sum(tensor.nbytes for _, tensor in policy.adapter())  # B and A of 14 layers
        assert max(map(abs, await gaps(policy, engine, version, long))) < ADAPTED_TOLERANCE
    assert 0 < moved["bytes"] < sum(tensor.nbytes for _, tensor in policy.weights()) / 2
    assert not list(tmp_path.iterdir())


@needs_vllm
async def test_a_frozen_request_goes_on_under_the_new_adapter_with_its_keys_and_values(
    parts: Parts, wide_headed_model_dir: Path
) -> None:
    policy, engine, channel = parts

    learn(policy)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    await channel.push(policy, 21)
    (task,) = await paused(engine, PauseMode.KEEP, ask(0, LONG), tokens=40)
    learn(policy)
    await channel.push(policy, 22)
    await engine.resume()
    generation = await task
    after = {name: tensor.clone() for name, tensor in policy.weights()}
    versions = list(generation.versions)
    switch = versions.index(22)
    assert versions == [21] * switch + [22] * (LONG - switch)
    assert switch >= 20
    kept = kept_scores(wide_headed_model_dir, (before, after), switch, PROMPT, generation.token_ids)
    assert generation.logprobs == pytest.approx(kept, abs=6 * ADAPTED_TOLERANCE)  # the largest of 450


class Strange(TorchPolicy):
    """Sends something other than its adapters."""

    fault = ""

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().adapter() if self.fault != "nothing" else ():
            wrong = self.fault == "wrong numbers" and "down_proj.lora_B" in name
            layer = "embedding" if self.fault == "unknown layer" else "down_proj"
            yield name.replace("down_proj", layer), tensor * 3 if wrong else tensor


@needs_vllm
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong numbers", "differ from the trainer's by"),
        ("unknown layer", r"did not take the adapter.*embedding.*--actor\.lora\.target_modules.*--actor\.lora\.sync"),
        ("nothing", "No adapter came from the trainer"),
    ],
)
async def test_an_adapter_that_does_not_arrive_is_noticed_and_the_next_push_heals(
    parts: Parts, fault: str, message: str
) -> None:
    policy, engine, channel = parts
    learn(policy)
    policy.__class__ = Strange
    policy.fault = fault  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=message):
        await channel.push(policy, 31)
    with pytest.raises(EngineError):
        await engine.generate(ask(0, 4))
    policy.fault = ""  # type: ignore[attr-defined]
    await channel.push(policy, 32)
    assert max(map(abs, await gaps(policy, engine, 32))) < ADAPTED_TOLERANCE


@needs_vllm
async def test_a_full_shared_memory_is_one_sentence(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _, channel = parts
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    with pytest.raises(ConfigurationError, match=r"/dev/shm has no room .* the adapter.*--shm-size"):
        await channel.push(policy, 41)


@pytest.fixture
def make(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def config(name: str, **train: Any) -> RLConfig:
        made = RLConfig()
        made.actor.model_name_or_path, made.actor.dtype = str(tiny_model_dir), "float32"  # type: ignore[assignment]
        made.actor.deterministic = ON_A_GPU  # runs are compared bit for bit
        made.actor.adam.lr = 1e-2
        made.actor.lora.rank, made.actor.lora.target_modules = 4, ("q_proj", "v_proj", "mlp.down_proj")
        made.algo.advantage.estimator = "group_norm"
        made.algo.kl.init_coef = 0.01
        made.data.prompt_dataset, made.data.label_key = str(tmp_path / "prompts.jsonl"), "label"
        made.rollout.batch_size, made.rollout.n_samples_per_prompt, made.rollout.max_new_tokens = 2, 3, 8
        made.train.max_steps, made.train.seed = 3, 5
        made.ckpt.output_dir, made.logger.console = str(tmp_path / name), False
        for key, value in train.items():
            setattr(made.train, key, value)
        return made

    return config


def train(config: RLConfig) -> tuple[Path, list[dict[str, float]]]:
    """(the trained model, what each step reported); letters are rewarded."""
    letters = FakeRewardSource(lambda r: sum(c.isalpha() for c in r.response) / (1 + len(r.response)))
    result = rollgrad.train(config, reward=letters)
    return result.model, logged(result.output_dir)


def parameters(path: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in plain(path, torch.float32).named_parameters()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_trains_the_layers_that_are_named(
    make: Callable[..., RLConfig], tiny_model_dir: Path, asynchronous: bool
) -> None:
    from peft import PeftModel

    settings = {"async_enable": True, "max_staleness": 0} if asynchronous else {}
    model, steps = train(make("out", **settings))
    assert len(steps) == 3
    assert steps[0]["policy/ref_kl"] == 0.0, "fresh adapters are the reference"
    assert all(abs(step["policy/ref_kl"]) > 1e-6 for step in steps[1:])
    assert max(step["policy/mismatch_abs"] for step in steps) < TOLERANCE
    before, after = parameters(tiny_model_dir), parameters(model)
    changed = {name.split(".")[-2] for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {"q_proj", "v_proj", "down_proj"}
    adapted = PeftModel.from_pretrained(plain(tiny_model_dir, torch.float32), model / "adapter").merge_and_unload()
    for name, weight in after.items():
        torch.testing.assert_close(adapted.get_parameter(name), weight, rtol=1e-5, atol=1e-6)


def test_the_reference_is_that_of_a_model_of_its_own(make: Callable[..., RLConfig], tiny_model_dir: Path) -> None:
    own = make("own")
    own.ref.model_name_or_path = str(tiny_model_dir)
    (model, steps), (other, same) = train(make("adapterless")), train(own)
    kept = [key for key in steps[0] if not key.startswith(("time/", "memory/", "policy/mismatch"))]
    for mine, theirs in zip(steps, same, strict=True):
        assert {key: mine[key] for key in kept} == pytest.approx({key: theirs[key] for key in kept}, rel=1e-5, abs=1e-7)
    ours, theirs = parameters(model), parameters(other)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_a_reference_in_processes_of_its_own_is_quantised_unless_another_model_is_named(
    make: Callable[..., RLConfig], tiny_model_dir: Path, load_in_4bit: bool
) -> None:
    config = make("out")
    config.actor.lora.load_in_4bit = load_in_4bit
    for name, quantised in ((None, load_in_4bit), (str(tiny_model_dir), False)):
        config.ref.model_name_or_path = name
        assert any(map(is_quantised, make_reference_model(config.actor, config.ref).parameters())) == quantised
    assert any(map(is_quantised, make_trained_actor(config.actor, config.train.seed).parameters())) == load_in_4bit
    assert not any(map(is_quantised, make_actor_model(config.actor).parameters())), "an engine's own model"


@pytest.mark.parametrize("load_in_4bit", [pytest.param(False, marks=pytest.mark.wide), True])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    make: Callable[..., RLConfig], tiny_model_dir: Path, load_in_4bit: bool
) -> None:
    uninterrupted, begun, resumed = make("whole"), make("out", max_steps=2), make("out")
    begun.ckpt.state_steps = resumed.ckpt.state_steps = 1
    resumed.ckpt.resume = True
    for config in (uninterrupted, begun, resumed):
        config.actor.lora.load_in_4bit = load_in_4bit
    whole, steps = train(uninterrupted)
    assert steps[0]["policy/ref_kl"] == 0.0, "the reference is as quantised as the actor"
    train(begun)
    model, steps = train(resumed)
    assert len(steps) == 3
    assert max(step["policy/mismatch_abs"] for step in steps) < TOLERANCE
    expected = parameters(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in parameters(model).items())
    base = parameters(tiny_model_dir)
    dequantised = {name for name, weight in expected.items() if "gate_proj" in name and (weight != base[name]).any()}
    assert len(dequantised) == (2 if load_in_4bit else 0), "they have no adapters"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"alpha": 16},
            "actor.lora.alpha is 16, but actor.lora.rank is 0, which trains all weights: set --actor.lora.rank above "
            "0, or leave --actor.lora.alpha out.",
        ),
        ({"target_modules": ("q_proj",)}, "leave --actor.lora.target_modules out."),
        ({"rank": 4, "target_modules": ("all-linear", "q_proj")}, "all-linear already means every linear layer"),
        ({"sync": LoraSync.ADAPTER}, "leave --actor.lora.sync out."),
        (
            {"rank": 4, "sync": LoraSync.ADAPTER},
            "actor.lora.sync is adapter, but rollout.engine is embedded, and vLLM alone takes adapters without weights:"
            " set --rollout.engine vllm, or leave --actor.lora.sync out.",
        ),
        ({"load_in_4bit": True}, "leave --actor.lora.load_in_4bit out."),
        ({"rank": -1}, "actor.lora.rank is -1, but it must be at least 0"),
        ({"rank": 4, "alpha": 0}, "actor.lora.alpha is 0, but it must be greater than 0"),
        ({"rank": 4, "target_modules": ()}, "but it must be at least one name"),
    ],
)
def test_settings_that_say_nothing_or_two_things_are_refused(
    make: Callable[..., RLConfig], settings: dict[str, Any], message: str
) -> None:
    config = make("out")
    config.actor.lora = LoraConfig(**settings)
    with pytest.raises(ConfigurationError) as error:
        validate(config, has_reward=True)
    assert message in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.parametrize(("rslora", "scale"), [(False, 16 / 4), (True, 16 / 2)])
def test_vllm_reads_by_how_much_adapters_count(rslora: bool, scale: float, tmp_path: Path) -> None:
    """By vLLM's own reader of what is written for it."""
    from vllm.lora.peft_helper import PEFTHelper

    core = object.__new__(adapter.AdapterCore)
    core._lora = LoraConfig(rank=4, alpha=16, rslora=rslora)
    core._write({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 8)}, tmp_path)
    assert PEFTHelper.from_local_dir(str(tmp_path), None).vllm_lora_scaling_factor == scale


@pytest.mark.skipif(ON_A_GPU, reason="there vLLM computes them")
def test_adapters_of_a_mixture_are_refused_on_a_cpu(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """vLLM would die of its first request: it has adapters beside experts in Triton alone."""
    from rollgrad.adapters.engines.vllm.engine import VLLMEngine

    path = saved(tiny_architecture("qwen3_moe", vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "mixture")
    with pytest.raises(ConfigurationError, match=r"a mixture of experts.*leave --actor\.lora\.sync out"):
        VLLMEngine(str(path), eos_token_ids=(), dtype="float32", lora=LORA)


def test_a_rank_that_vllm_does_not_compute_is_refused(make: Callable[..., RLConfig]) -> None:
    config = make("out")
    config.rollout.engine, config.actor.lora = Engine.VLLM, LoraConfig(rank=513, sync=LoraSync.ADAPTER)
    with pytest.raises(ConfigurationError, match=r"rank is 513.* 512 at most: lower --actor\.lora\.rank"):
        validate(config, has_reward=True)
    config.actor.lora.rank = 512
    validate(config, has_reward=True)


def test_adapters_to_quantised_weights_are_not_sent_without_them(make: Callable[..., RLConfig]) -> None:
    config = make("out")
    config.rollout.engine = Engine.VLLM
    config.actor.lora = LoraConfig(rank=4, load_in_4bit=True, sync=LoraSync.ADAPTER)
    with pytest.raises(ConfigurationError, match=r"another model: leave one of --actor\.lora\.load_in_4bit and --act"):
        validate(config, has_reward=True)
    config.actor.lora.sync = LoraSync.MERGED
    validate(config, has_reward=True)


def test_vllm_starts_for_adapters_if_they_alone_are_sent(make: Callable[..., RLConfig], tiny_tokenizer: Any) -> None:
    config = make("out")
    config.rollout.engine = Engine.VLLM
    assert vllm_settings(config, tiny_tokenizer, gpus=True, plays=False)["lora"] is None
    assert weight_backend_kind(config, gpus=True) == "cuda_ipc"
    config.actor.lora.sync = LoraSync.ADAPTER
    settings = vllm_settings(config, tiny_tokenizer, gpus=True, plays=False)
    assert settings["lora"] == config.actor.lora
    assert settings["sync_backend"] == "shared_memory"
    assert weight_backend_kind(config, gpus=True) == "adapter"
    validate(config, has_reward=True)
    config.vllm.sync_backend = SyncBackend.NCCL
    with pytest.raises(ConfigurationError, match="adapters reach vLLM through shared memory alone"):
        validate(config, has_reward=True)


def test_a_layer_that_the_model_does_not_have_is_refused(make: Callable[..., RLConfig]) -> None:
    config = make("out")
    config.actor.lora.target_modules = ("c_attn",)
    with pytest.raises(
        ConfigurationError, match=r"'c_attn'.* are down_proj, gate_proj, .*--actor\.lora\.target_modules"
    ):
        train(config)
