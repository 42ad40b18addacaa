"""vLLM itself on a small model in float32 and float16: what it says of its tokens is what the trainer computes."""

import asyncio
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from jsonschema import validate

from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.engines.vllm.weight_receiver import read_shard
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.heads.allowed_tokens import follow_grammars
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.adapters.weights.delta import Changes
from rollgrad.adapters.weights.disk import Disk
from rollgrad.adapters.weights.shared_memory import shared_memory
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.control.admission import BLOCK
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import CheckpointError, ConfigurationError, EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.entrypoints.composition.engines import make_grammars
from tests.caught_requests import paused
from tests.integration.test_structured_output import SCHEMA, Sampler, play_one
from tests.kept_scores import kept_scores
from tests.one_reply import PROMPT, learn, scores
from tests.tiny_models import LONG

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

FLAG = "--actor.model_name_or_path"

TOLERANCE = 1e-4
"""Largest difference of a log-prob: products are summed in another order, no more."""

HALF_TOLERANCE = 0.02
"""Largest difference where one of them computes in float16, whose numbers have 11 bits."""


def ask(seed: int = 0, prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt, params=SamplingParams(**{"max_new_tokens": 24, "seed": seed, **params})
    )


@pytest.fixture
def policy(wide_headed_model_dir: Path) -> TorchPolicy:
    path = str(wide_headed_model_dir)
    model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    return TorchPolicy(model, load_tokenizer(path, flag=FLAG), OptimizerSettings(lr=0.02))


@pytest_asyncio.fixture(loop_scope="session")
async def channel(vllm_engine: VLLMEngine, policy: TorchPolicy) -> AsyncIterator[EngineWeights]:
    """Afterwards the engine has the weights of the checkpoint again."""
    original = {name: tensor.clone() for name, tensor in policy.weights()}
    channel = EngineWeights(vllm_engine)
    yield channel
    with torch.no_grad():
        for name, tensor in policy.weights():
            tensor.copy_(original[name])
    await vllm_engine.pause(PauseMode.ABORT)
    await channel.push(policy, 0)


@torch.no_grad()
def plain_logits(model_dir: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Row t is of the token after t, by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return model(torch.tensor([list(tokens)])).logits[0]


async def test_of_earlier_turns_whole_blocks_are_kept(vllm_engine: VLLMEngine) -> None:
    prompt = tuple(range(20, 220))
    first = await vllm_engine.generate(ask(prompt=prompt))
    assert first.kept == 0
    later = await vllm_engine.generate(ask(prompt=(*prompt, *first.token_ids, 7, 8)))
    assert later.kept is not None
    assert len(prompt) - BLOCK < later.kept <= len(prompt) + len(first.token_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [0, 5])
async def test_logprobs_are_of_the_distribution_that_was_sampled(
    vllm_engine: VLLMEngine, wide_headed_model_dir: Path, temperature: float, top_k: int
) -> None:
    generation = await vllm_engine.generate(ask(temperature=temperature, top_k=top_k))
    logits = plain_logits(wide_headed_model_dir, [*PROMPT, *generation.token_ids])[len(PROMPT) - 1 : -1] / temperature
    if top_k:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    expected = logits.log_softmax(-1)[range(24), list(generation.token_ids)]
    assert generation.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


async def test_logprobs_within_a_nucleus_are_renormalised(vllm_engine: VLLMEngine, wide_headed_model_dir: Path) -> None:
    generation = await vllm_engine.generate(ask(top_p=0.5))
    probs = plain_logits(wide_headed_model_dir, [*PROMPT, *generation.token_ids])[len(PROMPT) - 1 : -1].softmax(-1)
    for row, token, logprob in zip(probs, generation.token_ids, generation.logprobs, strict=True):
        ordered = row.sort(descending=True).values
        size = int((ordered.cumsum(0) < 0.5).sum()) + 1
        assert row[token] >= ordered[size - 1]
        assert logprob == pytest.approx(float((row[token] / ordered[:size].sum()).log()), abs=1e-3)


async def test_greedy_tokens_are_the_likeliest_with_logprobs_of_temperature_one(
    vllm_engine: VLLMEngine, wide_headed_model_dir: Path
) -> None:
    greedy, _ = await asyncio.gather(
        vllm_engine.generate(ask(temperature=0.0)), vllm_engine.generate(ask(temperature=0.3, top_k=2))
    )
    greedy = greedy
    rows = plain_logits(wide_headed_model_dir, [*PROMPT, *greedy.token_ids])[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert list(greedy.token_ids) == rows.argmax(-1).tolist()
    assert greedy.logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=TOLERANCE)


async def test_the_trainer_knows_the_tokens_that_a_form_allowed(
    vllm_engine: VLLMEngine, wide_headed_model_dir: Path, tmp_path: Path
) -> None:
    """Its log-probs are of the distribution that was sampled, whose tokens are those of its masks and no others; also
    in steps in which the log-probs of given tokens are asked for, as after a push."""
    sampler = Sampler(wide_headed_model_dir)
    for file in wide_headed_model_dir.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end, other_end = sampler.tokenizer.eos_token_id, 5
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, other_end]}))
    config = RLConfig()
    config.actor.model_name_or_path, config.rollout.engine = str(tmp_path), Engine.VLLM
    masks = make_grammars(config, sampler.tokenizer).masks
    asked = [
        sampler.ask(seed, grammar=seed != 1, temperature=0.7, stop_token_ids=(end, other_end), top_logprobs=20)
        for seed in range(4)
    ]
    given = [vllm_engine.core.next_logprob(f"given-{number}", PROMPT, 5, 0.7) for number in range(8)]
    played, found = await asyncio.gather(
        asyncio.gather(*(play_one(vllm_engine, sample_id, request) for sample_id, request in enumerate(asked))),
        asyncio.gather(*given),
    )
    expected = (plain_logits(wide_headed_model_dir, PROMPT)[-1] / 0.7).log_softmax(-1)[5]
    assert found == pytest.approx([float(expected)] * 8, abs=TOLERANCE)
    whole, batch = PackedLM(sampler.model, temperature=0.7), pack([trajectory for _, trajectory in played])
    follow_grammars(sampler.model, masks)
    sampled = batch.rollout_logprobs_N[batch.action_mask_N]
    torch.testing.assert_close(whole(batch)[0].detach(), sampled, rtol=0, atol=TOLERANCE)
    forms = [reply for reply, _ in played if reply.grammar is not None]
    assert len(forms) == 3
    narrow = 0
    for reply in forms:
        validate(json.loads(sampler.codec.decode(reply.token_ids)), SCHEMA)
        bits = np.unpackbits(masks(str(reply.grammar), list(reply.token_ids)).numpy(), axis=1, bitorder="little")
        for row, likeliest in zip(bits, reply.top_logprobs, strict=True):
            if row.sum() <= 20:
                narrow += 1
                assert {token for token, _ in likeliest} == set(row.nonzero()[0].tolist())
    assert narrow > 20


async def test_sixty_four_requests_at_once(vllm_engine: VLLMEngine, policy: TorchPolicy) -> None:
    for seed, generation in enumerate(
        await asyncio.gather(*(vllm_engine.generate(ask(s, prompt=(*PROMPT, s))) for s in range(64)))
    ):
        assert len(generation.token_ids) == 24
        expected = scores(policy, (*PROMPT, seed), generation.token_ids)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_each_token_is_heard_once_and_in_order(vllm_engine: VLLMEngine) -> None:
    heard: list[int] = []
    silent = await vllm_engine.generate(ask())
    generation = await vllm_engine.generate(ask(), on_token=heard.append)
    assert heard == list(generation.token_ids) == list(silent.token_ids)
    assert len(generation.logprobs) == len(generation.versions) == 24


async def test_the_work_of_each_of_its_processes_is_recorded(vllm_engine: VLLMEngine) -> None:
    async def profiled() -> Mapping[str, bytes]:
        await vllm_engine.begin_profile()
        await vllm_engine.generate(ask(max_new_tokens=3))
        return await vllm_engine.end_profile()

    for _ in range(2):
        (trace,) = (await profiled()).items()
        assert trace[0] == "vllm-0"
        events = json.loads(gzip.decompress(trace[1]))["traceEvents"]
        assert any(event["name"].startswith("aten::") for event in events)
    await vllm_engine.generate(ask(max_new_tokens=3))


async def test_a_stop_string_is_part_of_the_reply(vllm_engine: VLLMEngine, wide_headed_model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(wide_headed_model_dir), flag=FLAG)
    full = list((await vllm_engine.generate(ask())).token_ids)
    stop = next(text for token in full[6:] if (text := tokenizer.decode([token])).isascii() and text)
    generation = await vllm_engine.generate(ask(stop_strings=(stop,)))
    assert generation.stop_reason is StopReason.STOP
    assert list(generation.token_ids) == full[: len(generation.token_ids)]
    assert stop in tokenizer.decode(generation.token_ids)
    assert stop not in tokenizer.decode(list(generation.token_ids)[:-1])
    assert len(generation.logprobs) == len(generation.versions) == len(generation.token_ids)


async def test_no_stop_token_before_the_minimum(vllm_engine: VLLMEngine, wide_headed_model_dir: Path) -> None:
    stop = tuple((await vllm_engine.generate(ask())).token_ids[:3])
    generation = await vllm_engine.generate(ask(stop_token_ids=stop, min_new_tokens=10))
    assert not set(generation.token_ids[:10]) & set(stop)
    logits = plain_logits(wide_headed_model_dir, [*PROMPT, *generation.token_ids])[len(PROMPT) - 1 : -1]
    end = load_tokenizer(
        str(wide_headed_model_dir), flag=FLAG
    ).eos_token_id  # vLLM's minimum keeps it off, asked or not
    logits[:10, [*stop, end]] = float("-inf")
    expected = logits.log_softmax(-1)[range(len(generation.token_ids)), list(generation.token_ids)]
    assert generation.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


async def test_what_is_longer_than_the_engine_holds_is_refused(vllm_engine: VLLMEngine) -> None:
    assert vllm_engine.max_tokens == 512
    with pytest.raises(ConfigurationError, match=r"513 tokens.*holds 512"):
        await vllm_engine.generate(ask(max_new_tokens=510))
    assert len((await vllm_engine.generate(ask(prompt=(65,) * 510, max_new_tokens=2))).token_ids) == 2


async def test_a_cancelled_call_leaves_nothing_in_vllm(vllm_engine: VLLMEngine) -> None:
    tasks = [asyncio.create_task(vllm_engine.generate(ask(s, max_new_tokens=400))) for s in range(8)]
    await vllm_engine.generate(ask(max_new_tokens=2))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert vllm_engine.llm.get_num_unfinished_requests() == 0


async def test_an_abort_returns_the_tokens_so_far_and_refuses_those_who_wait(
    vllm_engine: VLLMEngine, policy: TorchPolicy
) -> None:
    (frozen,) = await paused(vllm_engine, PauseMode.KEEP, ask(max_new_tokens=LONG), tokens=20)
    waiting = asyncio.create_task(vllm_engine.generate(ask()))
    await asyncio.sleep(0)
    await vllm_engine.pause(PauseMode.ABORT)
    begun, waiting = await frozen, await waiting
    assert begun.stop_reason is waiting.stop_reason is StopReason.ABORTED
    assert list(waiting.token_ids) == []
    assert 0 < len(begun.token_ids) < LONG
    assert begun.logprobs == pytest.approx(scores(policy, PROMPT, begun.token_ids), abs=TOLERANCE)
    assert set(begun.versions) == {0}


async def test_after_a_push_the_engine_computes_what_the_trainer_computes(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights
) -> None:
    before = await vllm_engine.generate(ask())
    learn(policy, steps=5)
    assert before.logprobs != pytest.approx(scores(policy, PROMPT, before.token_ids), abs=0.01)
    moved = await channel.push(policy, 3)
    assert moved["bytes"] == sum(tensor.nbytes for _, tensor in policy.weights())
    after = await vllm_engine.generate(ask())
    assert after.logprobs == pytest.approx(scores(policy, PROMPT, after.token_ids), abs=TOLERANCE)
    assert set(after.versions) == {3}


async def test_an_engine_in_another_number_format_takes_float16(
    vllm_engine: VLLMEngine, channel: EngineWeights, wide_headed_model_dir: Path
) -> None:
    path = str(wide_headed_model_dir)
    model = load_causal_lm(path, dtype=torch.float16, device=torch.device("cpu"), flag=FLAG)
    half = TorchPolicy(model, load_tokenizer(path, flag=FLAG), OptimizerSettings(lr=0.02))
    learn(half, steps=5)
    assert (await channel.push(half, 3))["bytes"] == sum(2 * tensor.numel() for _, tensor in half.weights())
    after = await vllm_engine.generate(ask())
    assert after.logprobs == pytest.approx(scores(half, PROMPT, after.token_ids), abs=HALF_TOLERANCE)


async def test_the_checkpoint_pushed_again_gives_its_very_logprobs(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights
) -> None:
    first = await vllm_engine.generate(ask())
    original = {name: tensor.clone() for name, tensor in policy.weights()}
    learn(policy, steps=5)
    await channel.push(policy, 1)
    assert list((await vllm_engine.generate(ask())).logprobs) != list(first.logprobs)
    with torch.no_grad():
        for name, tensor in policy.weights():
            tensor.copy_(original[name])
    await channel.push(policy, 2)
    again = await vllm_engine.generate(ask())
    assert list(again.token_ids) == list(first.token_ids)
    assert list(again.logprobs) == list(first.logprobs)


async def test_a_frozen_request_goes_on_under_the_new_weights_with_its_keys_and_values(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights, wide_headed_model_dir: Path
) -> None:
    """Its recorded log-probs are those of the distribution it was drawn from: new weights on old keys and values."""

    untrained = {name: tensor.clone() for name, tensor in policy.weights()}
    (task,) = await paused(vllm_engine, PauseMode.KEEP, ask(max_new_tokens=LONG), tokens=40)
    learn(policy, steps=5)
    await channel.push(policy, 1)
    await vllm_engine.resume()
    generation = await task
    trained = {name: tensor.clone() for name, tensor in policy.weights()}
    versions = list(generation.versions)
    switch = versions.index(1)
    assert versions == [0] * switch + [1] * (LONG - switch)
    assert switch >= 20
    kept = kept_scores(wide_headed_model_dir, (untrained, trained), switch, PROMPT, generation.token_ids)
    assert generation.logprobs == pytest.approx(kept, abs=TOLERANCE)
    recomputed = scores(policy, PROMPT, generation.token_ids)[switch:]
    assert max(abs(a - b) for a, b in zip(generation.logprobs[switch:], recomputed, strict=True)) > 10 * TOLERANCE


async def test_what_is_asked_after_a_push_reads_no_keys_and_values_of_the_old_weights(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights
) -> None:
    """Also while a frozen request with the same prompt goes on with the old ones, and after it has ended."""
    prompt = (*PROMPT, *(10 + token % 200 for token in range(200)))  # some blocks of the prefix cache

    for version in itertools.count(1):
        (frozen,) = await paused(vllm_engine, PauseMode.KEEP, ask(prompt=prompt, max_new_tokens=300))
        learn(policy, steps=5)
        await channel.push(policy, version)
        await vllm_engine.resume()
        beside = await vllm_engine.generate(ask(1, prompt=prompt, max_new_tokens=8))
        if not frozen.done():
            break
        await frozen  # this process, kept from working, heard of the other's end too late: asked again
    assert set((await frozen).versions) == {version - 1, version}
    for generation in [beside, await vllm_engine.generate(ask(2, prompt=prompt))]:
        assert generation.logprobs == pytest.approx(scores(policy, prompt, generation.token_ids), abs=TOLERANCE)


class Lossy(TorchPolicy):
    """Sends something other than it has."""

    fault = ""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(super().weights()):
            if self.fault == "lacks a tensor" and index == 4:
                continue
            if self.fault == "breaks off" and index == 4:
                raise OSError("the trainer lost a rank")
            wrong = self.fault == "wrong numbers" and "down_proj" in name
            yield (f"no.such.{name}" if self.fault == "unknown name" else name), tensor * 3 if wrong else tensor


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong numbers", "differ from the trainer's by"),
        ("lacks a tensor", "did not come from the trainer"),
        ("unknown name", "no module or parameter named"),
        ("breaks off", "lost a rank"),
    ],
)
async def test_weights_that_do_not_arrive_are_noticed_and_the_next_push_heals(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights, fault: str, message: str
) -> None:
    policy.__class__ = Lossy
    assert isinstance(policy, Lossy)
    learn(policy, steps=5)
    policy.fault = fault
    with pytest.raises((EngineError, OSError), match=message):
        await channel.push(policy, 1)
    with pytest.raises(EngineError, match="weights"):
        await vllm_engine.generate(ask())
    policy.fault = ""
    await channel.push(policy, 2)
    generation = await vllm_engine.generate(ask())
    assert generation.logprobs == pytest.approx(scores(policy, PROMPT, generation.token_ids), abs=TOLERANCE)
    assert set(generation.versions) == {2}


async def test_a_wrong_model_is_noticed_when_frozen_requests_go_on(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights
) -> None:
    (task,) = await paused(vllm_engine, PauseMode.KEEP, ask(max_new_tokens=LONG))
    policy.__class__ = Lossy
    policy.fault = "wrong numbers"  # type: ignore[attr-defined]
    await channel.push(policy, 1)
    with pytest.raises(EngineError, match="differ from the trainer's"):
        await vllm_engine.resume()
    await task
    policy.fault = ""


async def test_weights_through_files_are_the_trainer_s(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    through_files = EngineWeights(vllm_engine, backend=Disk(tmp_path / "weights", shard_bytes=2**15))
    for version in (3, 4):
        learn(policy, steps=5)
        moved = await through_files.push(policy, version)
        generation = await vllm_engine.generate(ask())
        assert generation.logprobs == pytest.approx(scores(policy, PROMPT, generation.token_ids), abs=TOLERANCE)
        assert set(generation.versions) == {version}
        (own,) = (tmp_path / "weights").iterdir()
        files = sorted(own.iterdir())
        assert len(files) > 3
        written = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert written.keys() == dict(policy.weights()).keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in policy.weights())
        assert moved["bytes"] == sum(tensor.nbytes for tensor in written.values())

    policy.__class__ = Lossy
    policy.fault = "lacks a tensor"  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="did not come from the trainer"):
        await through_files.push(policy, 5)
    policy.fault = ""  # type: ignore[attr-defined]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="does not take the weights for the engines"):
        await EngineWeights(vllm_engine, backend=Disk(tmp_path / "file")).push(policy, 5)


@pytest.mark.parametrize("way", ["shared_memory", "disk"])
async def test_changes_alone_make_the_engine_that_all_weights_make(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights, tmp_path: Path, way: str
) -> None:
    """Its log-probs have the same bits. After a push that the channel of changes does not know of, the engine refuses
    them, and takes all weights."""
    chance = torch.Generator().manual_seed(0)
    backend = Disk(tmp_path / "weights") if way == "disk" else shared_memory
    of_changes = EngineWeights(vllm_engine, backend=Changes(backend))

    @torch.no_grad()
    def step() -> None:
        for _, tensor in policy.weights():
            changed = torch.rand(tensor.shape, generator=chance) < 0.02
            tensor.add_(changed * torch.randn(tensor.shape, generator=chance) * 0.1)

    whole = (await of_changes.push(policy, 1))["bytes"]
    assert whole == sum(tensor.nbytes for _, tensor in policy.weights())
    for version in (2, 3, 4):
        step()
        assert 0 < (await of_changes.push(policy, version))["bytes"] < 0.1 * whole
    found = await vllm_engine.generate(ask())
    assert set(found.versions) == {4}
    assert found.logprobs == pytest.approx(scores(policy, PROMPT, found.token_ids), abs=TOLERANCE)
    assert (await channel.push(policy, 5))["bytes"] == whole
    expected = await vllm_engine.generate(ask())
    assert (found.token_ids, list(found.logprobs)) == (expected.token_ids, list(expected.logprobs))
    step()
    with pytest.raises(EngineError, match="but here are those of None"):
        await of_changes.push(policy, 6)
    for version, size in ((7, whole), (8, 0)):
        assert (await of_changes.push(policy, version))["bytes"] == size
        healed = await vllm_engine.generate(ask())
        assert healed.logprobs == pytest.approx(scores(policy, PROMPT, healed.token_ids), abs=TOLERANCE)


def test_files_that_the_engine_does_not_see_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not on the engine's machine"):
        read_shard(str(tmp_path / "00000.safetensors"))


async def test_keys_and_values_sleep_until_new_weights_have_come(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def noted(name: str) -> Any:
        call = getattr(vllm_engine.llm, name)

        async def note(*arguments: Any, **settings: Any) -> Any:
            calls.append(settings.get("tags", name))
            return await call(*arguments, **settings)

        return note

    for name in ("sleep", "wake_up", "finish_weight_update", "reset_prefix_cache"):
        monkeypatch.setattr(vllm_engine.llm, name, noted(name))

    await vllm_engine.sleep()
    await vllm_engine.wake()
    await channel.push(policy, 1)
    await vllm_engine.generate(ask())
    await vllm_engine.sleep()
    await vllm_engine.wake()  # and no weights come
    await vllm_engine.sleep()  # vLLM cannot put to sleep what sleeps in part
    await vllm_engine.pause(PauseMode.KEEP)
    await vllm_engine.wake()
    await channel.push(policy, 2)
    waiting = asyncio.create_task(vllm_engine.generate(ask()))
    await vllm_engine.resume()
    assert set((await waiting).versions) == {2}
    weights, cache = ["weights"], ["kv_cache"]
    assert calls == [
        *("sleep", weights, "finish_weight_update", cache, "reset_prefix_cache"),
        *("sleep", weights, cache, "sleep"),
        *(weights, "finish_weight_update", cache, "reset_prefix_cache"),
    ]


async def test_a_sleeping_engine_takes_no_weights(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights
) -> None:
    await vllm_engine.sleep()
    with pytest.raises(EngineError, match="wake it first"):
        await channel.push(policy, 1)
    await vllm_engine.wake()
    await channel.push(policy, 1)


async def test_requests_made_during_a_push_wait_for_it(
    vllm_engine: VLLMEngine, policy: TorchPolicy, channel: EngineWeights
) -> None:
    pushing = asyncio.create_task(channel.push(policy, 1))
    while not vllm_engine._changing.locked():  # the push has not come to the engine
        await asyncio.sleep(0)
    generations = await asyncio.gather(*(vllm_engine.generate(ask(seed)) for seed in range(4)))
    await pushing
    assert {version for generation in generations for version in generation.versions} == {1}
