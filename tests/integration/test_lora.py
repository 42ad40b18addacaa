"""With adapters, too, every engine samples what the trainer computes, and whole runs end in a plain model."""

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.adapters.torch.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.torch.lora import add_lora
from rollgrad.adapters.torch.models import TorchPolicy
from rollgrad.adapters.torch.optimizer import OptimizerSettings
from rollgrad.adapters.transformers.engine import EmbeddedEngine
from rollgrad.adapters.transformers.weights import CopiedWeights, SharedWeights
from rollgrad.application.config import RLConfig
from rollgrad.application.model_config import LoraConfig
from rollgrad.application.validation import validate
from rollgrad.domain.batch import pack
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.domain.ports.weight_channel import WeightChannel
from rollgrad.domain.sampling import GenerationRequest, SamplingParams
from tests.event_loop import run
from tests.fakes.agent_executor import make_trajectory
from tests.fakes.reward_source import FakeRewardSource

FLAG = "--actor.model-name-or-path"
VLLM = [pytest.param("vllm", marks=pytest.mark.slow)] if importlib.util.find_spec("vllm") else []
PROMPT = (65, 66, 67)

TOLERANCE = 1e-4
"""Largest difference of a float32 log-prob: products are summed in another order, no more."""

Parts = tuple[TorchPolicy, RolloutEngine, WeightChannel]


def loaded(path: Path) -> Any:
    return load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)


def plain(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(params=["shared", "copied", *VLLM])
def parts(request: pytest.FixtureRequest, wide_headed_model_dir: Path) -> Iterator[Parts]:
    """A policy with adapters, whose head is tied, and an engine. Afterwards the engine has the checkpoint's weights."""
    model = loaded(wide_headed_model_dir)
    add_lora(model, LoraConfig(rank=4), seed=0)
    tokenizer = load_tokenizer(str(wide_headed_model_dir), flag=FLAG)
    policy = TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.02))
    if request.param == "vllm":
        from rollgrad.adapters.vllm.weights import EngineWeights

        engine = request.getfixturevalue("vllm_engine")
        channel = EngineWeights(engine)
        yield policy, engine, channel
        run(channel.push(TorchPolicy(loaded(wide_headed_model_dir), tokenizer, OptimizerSettings(lr=0.0)), 0))
    elif request.param == "copied":
        copied = EmbeddedEngine(loaded(wide_headed_model_dir), eos_token_ids=())
        yield policy, copied, CopiedWeights(copied)
    else:
        shared = EmbeddedEngine(model, eos_token_ids=())
        yield policy, shared, SharedWeights(shared)


def learn(policy: TorchPolicy) -> None:
    batch = pack([make_trajectory(PROMPT, [7, 8, 9, 200, 201])])

    def likelihood(scores: TokenScores, part: Any) -> LossOutput:
        return LossOutput(loss=-scores.logprobs_N.sum())

    for _ in range(3):
        policy.update([batch], likelihood)


def gaps(policy: TorchPolicy, engine: RolloutEngine, version: int) -> list[float]:
    """Trainer's log-probs less the engine's, of what the engine samples for several requests at once."""

    async def sample() -> Any:
        params = [SamplingParams(max_new_tokens=16, seed=seed) for seed in range(4)]
        requests = [GenerationRequest(prompt_token_ids=PROMPT, params=each) for each in params]
        return await asyncio.gather(*map(engine.generate, requests))

    found: list[float] = []
    for generation in run(sample()):
        assert set(generation.versions) == {version}
        batch = pack([make_trajectory(PROMPT, generation.token_ids)])
        scores = policy.score(batch).logprobs_N[len(PROMPT) :]
        found += (scores - torch.tensor(generation.logprobs)).tolist()
    return found


def test_the_engine_samples_what_the_trainer_computes(parts: Parts) -> None:
    policy, engine, channel = parts
    before = policy.score(pack([make_trajectory(PROMPT, [7, 8, 9])])).logprobs_N
    for version in (1, 2, 3):
        if version > 1:  # fresh adapters first
            learn(policy)
        run(channel.push(policy, version))
        assert max(map(abs, gaps(policy, engine, version))) < TOLERANCE
    after = policy.score(pack([make_trajectory(PROMPT, [7, 8, 9])])).logprobs_N
    assert (after - before).abs().max() > 0.5, "the adapters have learnt"


@pytest.fixture
def make(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def config(name: str, **train: Any) -> RLConfig:
        made = RLConfig()
        made.actor.model_name_or_path, made.actor.dtype = str(tiny_model_dir), "float32"  # type: ignore[assignment]
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
    lines = (result.output_dir / "metrics.jsonl").read_text().splitlines()
    return result.model, [json.loads(line) for line in lines]


def parameters(path: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in plain(path).named_parameters()}


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
    adapted = PeftModel.from_pretrained(plain(tiny_model_dir), model / "adapter").merge_and_unload()
    for name, weight in after.items():
        torch.testing.assert_close(adapted.get_parameter(name), weight, rtol=1e-5, atol=1e-6)


def test_the_reference_is_that_of_a_model_of_its_own(make: Callable[..., RLConfig], tiny_model_dir: Path) -> None:
    own = make("own")
    own.ref.model_name_or_path = str(tiny_model_dir)
    (model, steps), (other, same) = train(make("adapterless")), train(own)
    kept = [key for key in steps[0] if not key.startswith(("time/", "policy/mismatch"))]
    for mine, theirs in zip(steps, same, strict=True):
        assert {key: mine[key] for key in kept} == pytest.approx({key: theirs[key] for key in kept}, rel=1e-5, abs=1e-7)
    ours, theirs = parameters(model), parameters(other)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_a_resumed_run_is_the_run_that_was_never_interrupted(make: Callable[..., RLConfig]) -> None:
    whole, _ = train(make("whole"))
    begun = make("out", max_steps=2)
    begun.ckpt.state_steps = 1
    train(begun)
    resumed = make("out")
    resumed.ckpt.state_steps, resumed.ckpt.resume = 1, True
    model, steps = train(resumed)
    assert len(steps) == 3
    expected = parameters(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in parameters(model).items())


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


def test_a_layer_that_the_model_does_not_have_is_refused(make: Callable[..., RLConfig]) -> None:
    config = make("out")
    config.actor.lora.target_modules = ("c_attn",)
    with pytest.raises(
        ConfigurationError, match=r"'c_attn'.* are down_proj, gate_proj, .*--actor\.lora\.target-modules"
    ):
        train(config)
