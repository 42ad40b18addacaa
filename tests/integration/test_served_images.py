"""A real `vllm serve` of a small model that sees images: it computes what the trainer computes, before and after a
push."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch

import rollgrad
from rollgrad.adapters.chat.image_files import opened
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.entrypoints.cli.main import main
from tests.example_runs import logged, weights, written
from tests.fakes import cluster, images
from tests.integration.test_served_engine import serving
from tests.scripts import ScriptHost
from tests.tiny_vision import ask, codec_of, glass, save_tiny_vlm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]

TOLERANCE = 1e-4
"""Largest difference of a log-prob: products are summed in another order, no more."""
REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(query) % 3) for query in queries]\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_vlm("idefics3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: str, vllm_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(vllm_host.python(), Path(model), tmp_path_factory.mktemp("vllm")) as address:
        yield address


@pytest_asyncio.fixture(loop_scope="session")
async def engine(url: str, model: str) -> AsyncIterator[ServedEngine]:
    """With the weights of the checkpoint, whatever a test has left there."""
    processor = images.processor(model)
    engine = ServedEngine(url, eos_token_ids=(), vocabulary=len(processor.tokenizer))
    await engine.ready()
    await engine.require_images(ImageRenderer(processor))
    await engine.require_weights()
    await EngineWeights(engine).push(images.policy(model), 0)
    yield engine
    await engine.close()


def requests(model: str) -> list[GenerationRequest]:
    """Prompts with two images, one of them twice, with none, and with a transparent one behind which the policy sampled
    a placeholder."""
    processor = images.processor(model)
    codec = codec_of(processor)
    prompts = [ask(codec, "Is ", images.RED, " like ", images.WIDE, " or ", images.RED, "?"), ask(codec, "2 plus 2?")]
    pictured = ask(codec, glass(), "and?")
    sampled = (*pictured.token_ids, 9, ImageRenderer(processor).mark_token, 11)
    asked = [(prompt.token_ids, prompt.images) for prompt in prompts] + [(sampled, pictured.images)]
    return [
        GenerationRequest(prompt_token_ids=tokens, images=placed, params=SamplingParams(max_new_tokens=12, seed=seed))
        for seed in range(2)
        for tokens, placed in asked
    ]


def scores(policy: TorchPolicy, request: GenerationRequest, reply: Sequence[int]) -> list[float]:
    """The trainer's log-probs of a reply."""
    start = len(request.prompt_token_ids)
    tokens_T = torch.tensor([*request.prompt_token_ids, *reply])
    sequence = WeightedTokens(
        token_ids_T=tokens_T,
        weights_T=(torch.arange(len(tokens_T)) >= start).float(),
        prompt_length=start,
        images=request.images,
    )
    return policy.score(pack_sequences([sequence], group_ids=[0], sample_ids=[0])).logprobs_N[start:].tolist()


async def test_the_server_computes_what_the_trainer_computes_before_and_after_a_push(
    engine: ServedEngine, model: str
) -> None:
    """With the same images, of which the server has features of the tower as it was."""
    policy, asked = images.policy(model), requests(model)
    tower = [tensor for name, tensor in policy.weights() if "vision" in name]
    before = [tensor.clone() for tensor in tower]
    for version in (0, 1):
        if version:
            for _ in range(cluster.STEPS):
                policy.update([images.batch(model)], cluster.likelihood)
            await EngineWeights(engine).push(policy, version)
        replies = await asyncio.gather(*map(engine.generate, asked))
        for request, reply in zip(asked, replies, strict=True):
            assert set(reply.versions) == {version}
            assert list(reply.logprobs) == pytest.approx(scores(policy, request, reply.token_ids), abs=TOLERANCE)
    with torch.no_grad():
        for tensor, old in zip(tower, before, strict=True):
            tensor.copy_(old)
    for request, reply in zip(asked, replies, strict=True):  # old features would have been noticed
        stale = scores(policy, request, reply.token_ids) != pytest.approx(list(reply.logprobs), abs=10 * TOLERANCE)
        assert stale == bool(request.images)


async def test_greedy_tokens_are_those_of_transformers(engine: ServedEngine, model: str) -> None:
    from transformers import AutoModelForImageTextToText

    processor = images.processor(model)
    prompt = ask(codec_of(processor), "What is ", images.RED, " to ", images.WIDE, "?")
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    reply = await engine.generate(
        GenerationRequest(prompt_token_ids=prompt.token_ids, images=prompt.images, params=params)
    )
    inputs = processor(
        images=[[opened(images.RED), opened(images.WIDE)]],
        text=[
            processor.apply_chat_template(
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "What is "},
                            {"type": "image"},
                            {"type": "text", "text": " to "},
                            {"type": "image"},
                            {"type": "text", "text": "?"},
                        ],
                    }
                ],
                add_generation_prompt=True,
            )
        ],
        return_tensors="pt",
        add_special_tokens=False,
    )
    assert inputs["input_ids"][0].tolist() == list(prompt.token_ids)
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    generated = whole.generate(**inputs, do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert list(reply.token_ids) == generated[0, len(prompt.token_ids) :].tolist()


@pytest.fixture
def workspace(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RLConfig:
    """The current directory with images, rows and a reward; returns a run on them."""
    monkeypatch.chdir(tmp_path)
    for name, data in {"red": images.RED, "wide": images.WIDE}.items():
        Path(f"{name}.png").write_bytes(data)
    Path("reward.py").write_text(REWARD)
    rows = [
        {"prompt": "What is <image>?", "images": ["red.png"]},
        {"prompt": "Are they alike?", "images": ["wide.png", "red.png"]},
        {"prompt": "What is 1 plus 1?", "images": []},
    ]
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype, config.actor.adam.lr = model, DType.FLOAT32, 1e-2
    config.data.prompt_dataset, config.data.image_key = str(written(Path("prompts.jsonl"), rows)), "images"
    config.reward.function_path = "reward.py"
    config.rollout.engine, config.rollout.batch_size, config.rollout.n_samples_per_prompt = Engine.SERVER, 3, 2
    config.rollout.max_new_tokens, config.train.max_steps = 12, 3
    config.ckpt.output_dir, config.logger.console = "out", False
    return config


def test_a_run_on_a_server_learns_from_images(url: str, model: str, workspace: RLConfig) -> None:
    """Also its tower, which the images of later steps go through again."""
    workspace.rollout.server_urls = (url,)
    rollgrad.train(workspace)
    steps = [row for row in logged(Path("out")) if "policy/loss" in row]
    assert len(steps) == 3
    for step in steps:
        assert step["policy/mismatch_abs"] < TOLERANCE
    before, after = weights_of(model), weights(Path("out"))
    assert any("vision" in name and not before[name].equal(after[name]) for name in before)


def weights_of(model: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(Path(model) / "model.safetensors"))


async def test_a_chat_on_a_server_is_the_embedded_engines(
    engine: ServedEngine, url: str, model: str, workspace: RLConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for flags in (["--engine", "server", "--server_url", url], ["--dtype", "float32"]):
        words = ["chat", "--model", model, *flags, "--json", "--temperature", "0", "--max_new_tokens", "12"]
        assert await asyncio.to_thread(main, [*words, "--prompt", "/image red.png\nWhat is it?"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    served, embedded = (each["token_ids"] for each in told)
    assert served == embedded
    assert len(served) > 3
