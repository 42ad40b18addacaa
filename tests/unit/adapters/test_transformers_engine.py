"""The embedded engine on the tiny model: what it samples, and who shares what."""

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded import batch
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.grammars import Grammars
from rollgrad.adapters.engines.embedded.kept import KeptSequences
from rollgrad.adapters.engines.embedded.kv_cache import BLOCK
from rollgrad.adapters.engines.embedded.weights import SharedWeights
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.cluster import ClusterConfig
from rollgrad.application.settings.sections.rollout import Engine, RolloutConfig
from rollgrad.application.settings.sections.train import TrainConfig
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.entrypoints.composition.engines import make_engine
from rollgrad.testing.models import FakePolicy

POSITIONS = 512
DEADLINE = 60.0


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(str(path), dtype=dtype, device=torch.device("cpu"), flag="--actor.model_name_or_path")


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return load(tiny_model_dir)


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def decode(tiny_model_dir: Path) -> Callable[[Sequence[int]], str]:
    tokenizer = load_tokenizer(str(tiny_model_dir), flag="--actor.model_name_or_path")
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def engine(model: Any, *, eos: Sequence[int] = (), **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, eos_token_ids=eos, **settings)


def request(prompt: Sequence[int] = (10, 11, 12), **params: Any) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=tuple(prompt), params=SamplingParams(**{"max_new_tokens": 12, **params}))


async def gather(rollout: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return list(await asyncio.gather(*(rollout.generate(r) for r in requests)))


def tokens(generations: Sequence[Generation]) -> list[list[int]]:
    return [list(generation.token_ids) for generation in generations]


def many(count: int, **params: Any) -> list[GenerationRequest]:
    """Prompts of length 1 to 40, some of them equal."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        tuple(torch.randint(3, 280, (1 + 13 * (index % 4),), generator=generator).tolist()) for index in range(count)
    ]
    prompts[1::5] = [prompts[0]] * len(prompts[1::5])
    return [
        request(prompt, seed=index, max_new_tokens=3 + (7 * index) % 20, **params)
        for index, prompt in enumerate(prompts)
    ]


async def settle(rollout: EmbeddedEngine, sampled: list[int], count: int) -> None:
    """Until the engine's forward passes, which `sampled` collects, number `count`."""
    while len(sampled) < count:
        await asyncio.sleep(0.001)


@pytest.fixture
def passes(model: Any) -> Any:
    """Tokens of every forward pass."""
    seen: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(args[0].numel()))
    yield seen
    handle.remove()


async def test_greedy_is_transformers_generate(model: Any, plain: Any) -> None:
    prompts = [(10, 11, 12), (50,), tuple(range(20, 80)), (10, 11, 12)]
    generations = await gather(engine(model), [request(p, temperature=0.0, max_new_tokens=40) for p in prompts])
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=None,
        )
        assert list(generation.token_ids) == expected[0, len(prompt) :].tolist()
        assert generation.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.7},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0},
    ],
    ids=str,
)
async def test_logprobs_are_exact(model: Any, plain: Any, params: dict[str, Any]) -> None:
    requests = many(9, **params)
    for asked, generation in zip(requests, await gather(engine(model), requests), strict=True):
        prompt = asked.prompt_token_ids
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        with torch.no_grad():
            logits = plain(ids).logits[0, len(prompt) - 1 : -1].double() / (params.get("temperature") or 1.0)
        if params.get("top_k"):
            logits = logits.masked_fill(logits < logits.topk(params["top_k"]).values[:, -1:], -torch.inf)
        if params.get("top_p"):
            ordered, order = logits.softmax(-1).sort(descending=True)
            dropped = ordered.cumsum(-1) - ordered >= params["top_p"]
            logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, pytest.param(3, marks=pytest.mark.wide), 64])
async def test_neighbours_order_and_batch_size_change_nothing(model: Any, batch_size: int) -> None:
    requests = many(13)
    alone = [await engine(model).generate(asked) for asked in requests]
    order = list(reversed(range(13)))
    together = await gather(engine(model, max_batch_size=batch_size), [requests[index] for index in order])
    assert tokens(together) == [list(alone[index].token_ids) for index in order]


async def test_rows_leave_and_enter_a_small_batch(model: Any, passes: list[int]) -> None:
    requests = many(19)
    generations = await gather(engine(model, max_batch_size=4), requests)
    assert [len(g.token_ids) for g in generations] == [r.params.max_new_tokens for r in requests]
    prefills = [count for count in passes if count > 4]
    assert prefills, "prompts are prefilled"
    # Full places mean few steps: 19 requests of about 12 tokens in 4 places.
    total = sum(r.params.max_new_tokens for r in requests)
    decoding = [count for count in passes if count <= 4]
    assert len(decoding) < 1.5 * total / 4 + 20


async def test_a_prompt_is_prefilled_once_for_all_its_samples(model: Any, passes: list[int]) -> None:
    prompt = tuple(range(30, 130))
    generations = await gather(engine(model), [request(prompt, seed=s, max_new_tokens=5) for s in range(16)])
    assert passes == [100, 16, 16, 16, 16]
    assert len({tuple(g.token_ids) for g in generations}) > 10, "samples of a prompt differ"


async def test_prompts_of_one_wave_share_a_pass_within_the_token_limit(model: Any, passes: list[int]) -> None:
    requests = [request([20 + i] * 300, max_new_tokens=1) for i in range(40)]
    await gather(engine(model), requests)
    assert sum(passes) == 40 * 300
    assert all(count <= 8192 for count in passes)
    assert len(passes) == 2


@pytest.mark.parametrize("as_param", [False, True])
async def test_a_stop_token_ends_the_reply_and_belongs_to_it(model: Any, as_param: bool) -> None:
    greedy = await engine(model).generate(request(temperature=0.0))
    stop = greedy.token_ids[5]
    first = list(greedy.token_ids).index(stop)
    rollout = engine(model, eos=() if as_param else (stop,))
    asked = request(temperature=0.0, stop_token_ids=(stop,) if as_param else ())
    generation = await rollout.generate(asked)
    assert generation.stop_reason is StopReason.STOP
    assert list(generation.token_ids) == list(greedy.token_ids)[: first + 1]


async def test_a_stop_string_ends_the_reply(model: Any, decode: Callable[[Sequence[int]], str]) -> None:
    greedy = await engine(model).generate(request(temperature=0.0, max_new_tokens=30))
    stop = decode(greedy.token_ids)[9:12]
    generation = await engine(model, decode=decode).generate(
        request(temperature=0.0, max_new_tokens=30, stop_strings=(stop, "~~~~"))
    )

    assert generation.stop_reason is StopReason.STOP
    text = decode(generation.token_ids)
    assert stop in text
    assert stop not in decode(generation.token_ids[:-1])
    assert list(generation.token_ids) == list(greedy.token_ids)[: len(generation.token_ids)]


async def test_stop_strings_without_a_tokenizer_are_refused(model: Any) -> None:
    with pytest.raises(EngineError, match="tokenizer"):
        await engine(model).generate(request(stop_strings=("x",)))


async def test_no_stop_token_before_the_least_length(model: Any) -> None:
    everything = tuple(token for token in range(model.config.vocab_size) if token % 2)
    asked = [request(seed=s, stop_token_ids=everything, min_new_tokens=6, max_new_tokens=9) for s in range(20)]
    generations = await gather(engine(model), asked)
    for generation in generations:
        assert len(generation.token_ids) > 6
        assert all(token % 2 == 0 for token in generation.token_ids[:6])
    assert any(g.stop_reason is StopReason.STOP for g in generations)


async def test_more_than_the_models_positions_is_refused(model: Any) -> None:
    await engine(model).generate(request([5] * (POSITIONS - 2), max_new_tokens=2))
    with pytest.raises(ConfigurationError, match=r"513 tokens, but the model has 512.*--rollout\.max_new_tokens"):
        await engine(model).generate(request([5] * (POSITIONS - 2), max_new_tokens=3))


def blocks_held(rollout: EmbeddedEngine, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the engine memory for so many blocks of keys and values."""
    free = int(blocks * rollout._batch.block_bytes / rollout._batch._memory_share)
    monkeypatch.setattr(rollout._batch.decoder, "free_memory", lambda: free)


async def test_a_request_waits_until_its_longest_reply_has_room(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four requests that take two blocks each are sampled at a time; the one that takes one block comes
    after them, not before."""
    asked = [request([5 + n] * 100, seed=n, max_new_tokens=BLOCK - 90) for n in range(4)] + [request(seed=4)]
    rollout, seen = engine(model), []
    blocks_held(rollout, 5, monkeypatch)
    free = rollout._batch.decoder.cache.free
    monkeypatch.setattr(
        rollout._batch.decoder.cache, "free", lambda places: (seen.append(len(rollout._batch.rows)), free(places))
    )
    replies = await gather(rollout, asked)
    assert seen == [2, 3, 2], "two, then two and the short one"
    assert tokens(replies) == [list((await engine(model).generate(each)).token_ids) for each in asked]


async def test_a_request_that_can_never_have_room_is_refused_and_others_are_not(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = engine(model)
    blocks_held(rollout, 2, monkeypatch)
    most = request([5] * 100, max_new_tokens=2 * BLOCK - 99)
    more = request([5] * 100, max_new_tokens=2 * BLOCK - 98)

    calls = [rollout.generate(each) for each in (more, most, more)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await rollout.sleep()  # nothing is left in flight
    first, second, third = answers
    assert len(second.token_ids) == 2 * BLOCK - 99
    for refusal in (first, third):
        assert isinstance(refusal, ConfigurationError)
        assert re.search(r"100 tokens plus 158 new .* GiB .*\(256 tokens\).*--rollout\.max_new_tokens", str(refusal))


async def test_the_room_is_that_of_the_memory_free_at_each_waking(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long = request([5] * 100, max_new_tokens=BLOCK)

    rollout = engine(model)
    blocks_held(rollout, 1, monkeypatch)
    with pytest.raises(ConfigurationError, match="free memory"):
        await rollout.generate(long)
    await rollout.generate(request())
    blocks_held(rollout, 2, monkeypatch)
    with pytest.raises(ConfigurationError, match="free memory"):
        await rollout.generate(long)  # what it has allocated stays as it is
    await rollout.sleep()
    await rollout.wake()
    assert len((await rollout.generate(long)).token_ids) == BLOCK


def test_an_engine_that_keeps_its_memory_during_updates_takes_less(tiny_model_dir: Path, model: Any) -> None:
    def share(**settings: Any) -> float:
        config = RLConfig(rollout=RolloutConfig(engine=Engine.EMBEDDED), **settings)
        tokenizer = load_tokenizer(str(tiny_model_dir), flag="--actor.model_name_or_path")
        return make_engine(
            config, model, tokenizer, TemplateCodec(tokenizer), Grammars(tokenizer, ())
        )._batch._memory_share

    for keeps in ({"train": TrainConfig(async_enable=True)}, {"cluster": ClusterConfig(enable=True)}):
        assert share(**keeps) < share()


async def test_sequences_of_several_blocks_are_exact(model: Any, plain: Any) -> None:
    """Rows of one to four blocks, of which some end while others go on."""
    asked = [request([7 + n] * (40 * n + 1), seed=n, max_new_tokens=40 + 30 * n) for n in range(7)]
    for each, generation in zip(asked, await gather(engine(model, max_batch_size=5), asked), strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([[*each.prompt_token_ids, *generation.token_ids]])).logits
        expected = logits[0, len(each.prompt_token_ids) - 1 : -1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
async def test_a_gpu_samples_from_the_same_distribution(
    tiny_model_dir: Path, plain: Any, dtype: torch.dtype, allowed: float
) -> None:
    """Rows of one to four blocks; asleep, the engine holds no more of the GPU's memory than when it last slept."""
    loaded = load_causal_lm(
        str(tiny_model_dir), dtype=dtype, device=torch.device("cuda", 0), flag="--actor.model_name_or_path"
    )

    async def scenario(rollout: EmbeddedEngine) -> list[Generation]:
        await gather(rollout, asked)  # CUDA's libraries take memory of their own, and keep it
        await rollout.sleep()
        before = torch.cuda.memory_allocated()
        await rollout.wake()
        replies = await gather(rollout, asked)
        assert torch.cuda.memory_allocated() > before
        await rollout.sleep()
        assert torch.cuda.memory_allocated() <= before
        return replies

    asked = [request([7 + n] * (40 * n + 1), seed=n, max_new_tokens=40 + 30 * n) for n in range(7)]
    replies = await scenario(engine(loaded, max_batch_size=5))
    for each, generation in zip(asked, replies, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([[*each.prompt_token_ids, *generation.token_ids]])).logits
        expected = logits[0, len(each.prompt_token_ids) - 1 : -1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, rtol=allowed, atol=allowed)


async def test_a_request_without_tokens_is_refused(model: Any) -> None:
    with pytest.raises(EngineError, match="no prompt tokens"):
        await engine(model).generate(request([]))


@pytest.mark.parametrize("token", [-1, 10**6])
async def test_a_token_that_the_model_lacks_is_refused_and_other_replies_go_on(model: Any, token: int) -> None:
    rollout = engine(model)
    good = asyncio.create_task(rollout.generate(request(max_new_tokens=20)))
    with pytest.raises(DataError, match=f"the token id {token}, but those of the model are 0 to "):
        await rollout.generate(request([5, token]))
    assert len((await good).token_ids) == 20


async def test_keep_freezes_and_continues_under_the_new_version(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    expected = await rollout.generate(request(max_new_tokens=80))
    passes.clear()
    task = asyncio.create_task(rollout.generate(request(max_new_tokens=80)))
    await settle(rollout, passes, 10)
    await rollout.pause(PauseMode.KEEP)
    frozen = len(passes)
    await asyncio.sleep(0.05)
    assert len(passes) == frozen
    assert not task.done()
    rollout.set_version(7)
    await rollout.resume()
    expected, generation = expected, await task
    assert list(generation.token_ids) == list(expected.token_ids)
    assert set(generation.versions) == {0, 7}
    assert list(generation.versions) == sorted(generation.versions)


async def test_a_wait_after_keep_lets_the_frozen_ones_finish(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    task = asyncio.create_task(rollout.generate(request(max_new_tokens=100)))
    await settle(rollout, passes, 5)
    await rollout.pause(PauseMode.KEEP)
    await rollout.pause(PauseMode.WAIT)
    assert task.done()
    assert (await task).stop_reason is StopReason.LENGTH


async def test_abort_returns_what_there_is(model: Any, passes: list[int]) -> None:
    rollout = engine(model, max_batch_size=1)
    running = asyncio.create_task(rollout.generate(request(max_new_tokens=400)))
    waiting = asyncio.create_task(rollout.generate(request(max_new_tokens=400)))
    await settle(rollout, passes, 5)
    await rollout.pause(PauseMode.ABORT)
    running, waiting = await running, await waiting
    assert running.stop_reason is waiting.stop_reason is StopReason.ABORTED
    assert 5 <= len(running.token_ids) < 400
    assert len(running.token_ids) == len(running.logprobs) == len(running.versions)
    assert list(waiting.token_ids) == []


async def test_a_new_version_while_requests_run_is_refused(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    task = asyncio.create_task(rollout.generate(request(max_new_tokens=80)))
    await settle(rollout, passes, 3)
    with pytest.raises(EngineError, match="pause"):
        await SharedWeights(rollout).push(FakePolicy(), 1)
    assert rollout.version == 0
    assert set((await task).versions) == {0}
    await SharedWeights(rollout).push(FakePolicy(), 1)
    assert rollout.version == 1


async def test_a_pause_that_waits_includes_prompts_whose_first_pass_is_under_way(model: Any) -> None:
    rollout = engine(model)
    computing, go_on = threading.Event(), threading.Event()

    def held(*_: Any) -> None:
        computing.set()
        go_on.wait(DEADLINE)

    handle = model.get_input_embeddings().register_forward_hook(held)
    task = asyncio.create_task(rollout.generate(request(max_new_tokens=8)))
    await asyncio.to_thread(computing.wait, DEADLINE)
    pausing = asyncio.create_task(rollout.pause(PauseMode.WAIT))
    await asyncio.sleep(0.01)
    assert not pausing.done()
    go_on.set()
    await pausing
    handle.remove()
    await SharedWeights(rollout).push(FakePolicy(), 1)
    await rollout.resume()
    assert set((await task).versions) == {0}


async def test_a_cancelled_request_frees_its_place(model: Any, passes: list[int]) -> None:
    rollout = engine(model, max_batch_size=1)
    hog = asyncio.create_task(rollout.generate(request(max_new_tokens=500)))
    never = asyncio.create_task(rollout.generate(request(max_new_tokens=500, seed=1)))
    small = asyncio.create_task(rollout.generate(request(max_new_tokens=2)))
    await settle(rollout, passes, 5)
    hog.cancel()
    never.cancel()
    assert len((await small).token_ids) == 2
    assert len(passes) < 50
    assert hog.cancelled()
    assert never.cancelled()
    await rollout.pause(PauseMode.WAIT)
    await rollout.sleep()


async def test_requests_cancelled_while_paused_do_not_keep_it_awake(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    task = asyncio.create_task(rollout.generate(request(max_new_tokens=500)))
    await settle(rollout, passes, 5)
    await rollout.pause(PauseMode.KEEP)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rollout.sleep()
    await rollout.wake()
    await rollout.resume()
    assert len((await rollout.generate(request())).token_ids) == 12


async def test_sleep_refuses_in_flight_and_gives_memory_back(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    task = asyncio.create_task(rollout.generate(request(max_new_tokens=80)))
    await settle(rollout, passes, 3)
    with pytest.raises(EngineError, match="in flight"):
        await rollout.sleep()
    first = await task
    assert rollout._batch.decoder.cache.nbytes > 0
    await rollout.sleep()
    await rollout.sleep()
    assert rollout._batch.decoder.cache.nbytes == 0
    await rollout.wake()
    again = await rollout.generate(request(max_new_tokens=80))
    assert list(again.token_ids) == list(first.token_ids)


async def test_a_failing_step_reaches_every_caller_and_the_engine_lives_on(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    calls: list[int] = []

    def fail_once(module: Any, arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no room")

    model.model.norm.register_forward_pre_hook(fail_once)

    rollout = engine(model, max_batch_size=2)
    results = await asyncio.gather(*(rollout.generate(request(seed=s)) for s in range(5)), return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert all("MemoryError: no room" in str(result) for result in results)
    assert isinstance(results[0].__cause__, MemoryError)  # type: ignore[union-attr]
    assert rollout._batch.decoder.cache.nbytes == 0, "the memory that was too little is free again"
    after = await gather(rollout, many(6))
    expected = await gather(engine(model), many(6))
    assert tokens(after) == tokens(expected)


async def test_the_event_loop_stays_free(model: Any) -> None:
    """It does its work while the model computes a step."""
    answered: list[bool] = []

    loop = asyncio.get_running_loop()

    def in_a_step(*_: object) -> None:
        done = threading.Event()
        loop.call_soon_threadsafe(done.set)
        answered.append(done.wait(30.0))

    hook = model.get_input_embeddings().register_forward_pre_hook(in_a_step)
    try:
        await engine(model).generate(request(max_new_tokens=20))
    finally:
        hook.remove()
    assert len(answered) >= 20
    assert all(answered)


async def test_generation_leaves_the_model_trainable(tiny_model_dir: Path) -> None:
    """The engine may share the trainer's module: what it computed may not get into autograd's way."""
    model = load(tiny_model_dir)
    rollout = engine(model)
    await rollout.generate(request())
    from rollgrad.adapters.models.torch.layers.attention import ForestAttention
    from rollgrad.adapters.models.torch.layers.layout import prefill_layout

    layout, _ = prefill_layout([(4, 5, 6)])
    plan = ForestAttention(layout.nodes, device=torch.device("cpu"), dtype=torch.float32)
    hidden = model.base_model(
        input_ids=layout.tokens_M[None], position_ids=layout.positions_M[None], use_cache=False, attention_plan=plan
    ).last_hidden_state
    hidden.sum().backward()
    assert all(parameter.grad is not None for parameter in model.base_model.parameters())


@pytest.mark.parametrize("reply", [30, 200], ids=["a block", "blocks out of sight"])
async def test_a_window_is_kept_while_decoding(tmp_path: Path, reply: int) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=6,
        initializer_range=0.3,
        pad_token_id=0,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    asked = request((3, 4, 5, 6, 7, 8, 9, 10, 11), max_new_tokens=reply)

    rollout = engine(load(tmp_path))
    first = await rollout.generate(evolve(asked, keep=True))
    more = continuation(asked.prompt_token_ids, first, seed=11)
    first, more, second = first, more, await rollout.generate(more)
    for turn, generation in ((asked, first), (more, second)):
        ids = torch.tensor([[*turn.prompt_token_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = plain(ids).logits[0, len(turn.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, rtol=1e-4, atol=1e-4)


async def test_versions_are_the_ones_in_place(model: Any) -> None:
    rollout = engine(model)
    seen = []
    for version in range(3):
        rollout.set_version(version)
        seen.append(set((await rollout.generate(evolve(request(), params=SamplingParams(max_new_tokens=3)))).versions))
    assert seen == [{0}, {1}, {2}]


def continuation(prompt: Sequence[int], reply: Generation, *, seed: int) -> GenerationRequest:
    """The next turn: prompt, reply, and an observation of `seed` tokens."""
    return evolve(request((*prompt, *reply.token_ids, *range(60, 61 + seed)), seed=seed + 50), keep=True)


def continuations(first: Sequence[GenerationRequest], replies: Sequence[Generation]) -> list[GenerationRequest]:
    pairs = zip(first, replies, strict=True)
    return [continuation(asked.prompt_token_ids, reply, seed=index) for index, (asked, reply) in enumerate(pairs)]


async def test_a_continued_sequence_computes_its_new_tokens_only(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    first = [evolve(asked, keep=True) for asked in many(9)]
    replies = await gather(rollout, first)
    asked = [continuation(a.prompt_token_ids, r, seed=i) for i, (a, r) in enumerate(zip(first, replies, strict=True))]
    passes.clear()
    second = await gather(rollout, asked)
    asked, second, computed = asked, second, list(passes)
    # One pass for what is new: the last sampled token and the observation of each, padded to the longest.
    assert computed[0] == 9 * (1 + 9)
    for turn, generation in zip(asked, second, strict=True):
        fresh = await engine(model).generate(turn)
        assert list(fresh.token_ids) == list(generation.token_ids)
        torch.testing.assert_close(
            torch.tensor(fresh.logprobs), torch.tensor(generation.logprobs), rtol=1e-4, atol=1e-4
        )


async def test_continued_sequences_of_unlike_lengths_stay_within_the_token_limit(
    model: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are padded to the longest, which the limit counts."""
    monkeypatch.setattr(batch, "PREFILL_TOKENS", 100)

    rollout = engine(model)
    first = [evolve(request([5 + n] * 3, seed=n), keep=True) for n in range(6)]
    replies = await gather(rollout, first)
    asked = [continuation(a.prompt_token_ids, r, seed=1) for a, r in zip(first, replies, strict=True)]
    asked[3] = continuation(first[3].prompt_token_ids, replies[3], seed=80)
    passes.clear()
    replies = list(zip(asked, await gather(rollout, asked), strict=True))
    assert max(passes) == 82, "the long one goes alone"
    for turn, generation in replies:
        assert list((await engine(model).generate(turn)).token_ids) == list(generation.token_ids)


async def test_fresh_and_continued_prompts_are_admitted_together(model: Any) -> None:
    async def scenario() -> list[tuple[GenerationRequest, Generation]]:
        rollout = engine(model, max_batch_size=4)
        first = [evolve(asked, keep=True) for asked in many(6)]
        replies = await gather(rollout, first)
        asked = [
            continuation(a.prompt_token_ids, r, seed=i) for i, (a, r) in enumerate(zip(first, replies, strict=True))
        ]
        asked = [turn for pair in zip(asked, many(6), strict=True) for turn in pair]
        return list(zip(asked, await gather(rollout, asked), strict=True))

    for turn, generation in await scenario():
        assert list((await engine(model).generate(turn)).token_ids) == list(generation.token_ids)


async def test_new_weights_forget_what_was_kept(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    first = evolve(request(range(30, 70)), keep=True)
    asked = continuation(first.prompt_token_ids, await rollout.generate(first), seed=3)
    rollout.set_version(1)
    passes.clear()
    await rollout.generate(asked)
    asked, computed = asked, list(passes)
    assert computed[0] == len(asked.prompt_token_ids)


async def test_a_request_that_nothing_will_continue_is_not_kept(model: Any, passes: list[int]) -> None:
    rollout = engine(model)
    first = request(range(30, 70))
    asked = continuation(first.prompt_token_ids, await rollout.generate(first), seed=3)
    passes.clear()
    await rollout.generate(asked)
    asked, computed = asked, list(passes)
    assert computed[0] == len(asked.prompt_token_ids)


def test_kept_sequences_stay_within_their_memory() -> None:
    kept = KeptSequences(max_bytes=3 * 4 * 8)
    rows = [torch.full((1, 2, 1, 4, 1), float(i)) for i in range(4)]  # 32 bytes each
    for index, row in enumerate(rows):
        kept.keep((index, 1, 2, 3), row)
    assert kept.take((0, 1, 2, 3, 9)) is None, "the first one had to go"
    assert kept.take((3, 1, 2, 3)) is None, "there is nothing to compute after the kept tokens"
    assert kept.take((3, 1, 2, 3, 9)) is rows[3]
    assert kept.take((3, 1, 2, 3, 9)) is None, "what is taken is gone"
    kept.clear()
    assert kept.take((2, 1, 2, 3, 9)) is None


async def test_a_listener_hears_every_token_and_its_fault_is_its_own(model: Any) -> None:
    heard: list[int] = []

    def broken(token: int) -> None:
        raise ValueError("deaf")

    rollout = engine(model)
    first, second, third = await asyncio.gather(
        rollout.generate(request(seed=1), on_token=heard.append),
        rollout.generate(request(seed=2), on_token=broken),
        rollout.generate(request(seed=3)),
        return_exceptions=True,
    )
    assert isinstance(first, Generation)
    assert isinstance(third, Generation)
    first, second, third = first, second, third
    assert heard == list(first.token_ids)
    assert isinstance(second, ValueError)
    assert len(third.token_ids) == 12


async def test_a_reply_whose_listener_failed_is_not_sampled_on(model: Any, passes: list[int]) -> None:
    def broken(token: int) -> None:
        raise ValueError("deaf")

    rollout = engine(model)
    with pytest.raises(ValueError, match="deaf"):
        await rollout.generate(request(max_new_tokens=400), on_token=broken)
    await rollout.generate(request(seed=1))
    assert not rollout._batch.rows
    assert sum(passes) < 60
