"""The embedded engine on the tiny model: what it samples, and who shares what."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.kv_cache import KeptSequences
from rollgrad.adapters.engines.embedded.weights import SharedWeights
from rollgrad.adapters.models.torch.loading import load_causal_lm, load_tokenizer
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import ConfigurationError, EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode
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


def run(work: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE):
            return await work

    return asyncio.run(bounded())


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


def test_greedy_is_transformers_generate(model: Any, plain: Any) -> None:
    prompts = [(10, 11, 12), (50,), tuple(range(20, 80)), (10, 11, 12)]
    generations = run(gather(engine(model), [request(p, temperature=0.0, max_new_tokens=40) for p in prompts]))
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
def test_logprobs_are_exact(model: Any, plain: Any, params: dict[str, Any]) -> None:
    requests = many(9, **params)
    for asked, generation in zip(requests, run(gather(engine(model), requests)), strict=True):
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


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_neighbours_order_and_batch_size_change_nothing(model: Any, batch_size: int) -> None:
    requests = many(13)
    alone = [run(engine(model).generate(asked)) for asked in requests]
    order = list(reversed(range(13)))
    together = run(gather(engine(model, max_batch_size=batch_size), [requests[index] for index in order]))
    assert tokens(together) == [list(alone[index].token_ids) for index in order]


def test_rows_leave_and_enter_a_small_batch(model: Any, passes: list[int]) -> None:
    requests = many(19)
    generations = run(gather(engine(model, max_batch_size=4), requests))
    assert [len(g.token_ids) for g in generations] == [r.params.max_new_tokens for r in requests]
    prefills = [count for count in passes if count > 4]
    assert prefills, "prompts are prefilled"
    # Full places mean few steps: 19 requests of about 12 tokens in 4 places.
    total = sum(r.params.max_new_tokens for r in requests)
    decoding = [count for count in passes if count <= 4]
    assert len(decoding) < 1.5 * total / 4 + 20


def test_a_prompt_is_prefilled_once_for_all_its_samples(model: Any, passes: list[int]) -> None:
    prompt = tuple(range(30, 130))
    generations = run(gather(engine(model), [request(prompt, seed=s, max_new_tokens=5) for s in range(16)]))
    assert passes == [100, 16, 16, 16, 16]
    assert len({tuple(g.token_ids) for g in generations}) > 10, "samples of a prompt differ"


def test_prompts_of_one_wave_share_a_pass_within_the_token_limit(model: Any, passes: list[int]) -> None:
    requests = [request([20 + i] * 300, max_new_tokens=1) for i in range(40)]
    run(gather(engine(model), requests))
    assert sum(passes) == 40 * 300
    assert all(count <= 8192 for count in passes)
    assert len(passes) == 2


@pytest.mark.parametrize("as_param", [False, True])
def test_a_stop_token_ends_the_reply_and_belongs_to_it(model: Any, as_param: bool) -> None:
    greedy = run(engine(model).generate(request(temperature=0.0)))
    stop = greedy.token_ids[5]
    first = list(greedy.token_ids).index(stop)
    rollout = engine(model, eos=() if as_param else (stop,))
    asked = request(temperature=0.0, stop_token_ids=(stop,) if as_param else ())
    generation = run(rollout.generate(asked))
    assert generation.stop_reason is StopReason.STOP
    assert list(generation.token_ids) == list(greedy.token_ids)[: first + 1]


def test_a_stop_string_ends_the_reply(model: Any, decode: Callable[[Sequence[int]], str]) -> None:
    greedy = run(engine(model).generate(request(temperature=0.0, max_new_tokens=30)))
    stop = decode(greedy.token_ids)[9:12]
    generation = run(
        engine(model, decode=decode).generate(request(temperature=0.0, max_new_tokens=30, stop_strings=(stop, "~~~~")))
    )
    assert generation.stop_reason is StopReason.STOP
    text = decode(generation.token_ids)
    assert stop in text
    assert stop not in decode(generation.token_ids[:-1])
    assert list(generation.token_ids) == list(greedy.token_ids)[: len(generation.token_ids)]


def test_stop_strings_without_a_tokenizer_are_refused(model: Any) -> None:
    with pytest.raises(EngineError, match="tokenizer"):
        run(engine(model).generate(request(stop_strings=("x",))))


def test_no_stop_token_before_the_least_length(model: Any) -> None:
    everything = tuple(token for token in range(model.config.vocab_size) if token % 2)
    asked = [request(seed=s, stop_token_ids=everything, min_new_tokens=6, max_new_tokens=9) for s in range(20)]
    generations = run(gather(engine(model), asked))
    for generation in generations:
        assert len(generation.token_ids) > 6
        assert all(token % 2 == 0 for token in generation.token_ids[:6])
    assert any(g.stop_reason is StopReason.STOP for g in generations)


def test_more_than_the_models_positions_is_refused(model: Any) -> None:
    run(engine(model).generate(request([5] * (POSITIONS - 2), max_new_tokens=2)))
    with pytest.raises(ConfigurationError, match=r"513 tokens, but the model has 512.*--rollout\.max_new_tokens"):
        run(engine(model).generate(request([5] * (POSITIONS - 2), max_new_tokens=3)))


def test_a_request_without_tokens_is_refused(model: Any) -> None:
    with pytest.raises(EngineError, match="no prompt tokens"):
        run(engine(model).generate(request([])))


def test_keep_freezes_and_continues_under_the_new_version(model: Any, passes: list[int]) -> None:
    async def scenario() -> tuple[Generation, Generation]:
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
        return expected, await task

    expected, generation = run(scenario())
    assert list(generation.token_ids) == list(expected.token_ids)
    assert set(generation.versions) == {0, 7}
    assert list(generation.versions) == sorted(generation.versions)


def test_a_wait_after_keep_lets_the_frozen_ones_finish(model: Any, passes: list[int]) -> None:
    async def scenario() -> Generation:
        rollout = engine(model)
        task = asyncio.create_task(rollout.generate(request(max_new_tokens=100)))
        await settle(rollout, passes, 5)
        await rollout.pause(PauseMode.KEEP)
        await rollout.pause(PauseMode.WAIT)
        assert task.done()
        return await task

    assert run(scenario()).stop_reason is StopReason.LENGTH


def test_abort_returns_what_there_is(model: Any, passes: list[int]) -> None:
    async def scenario() -> tuple[Generation, Generation]:
        rollout = engine(model, max_batch_size=1)
        running = asyncio.create_task(rollout.generate(request(max_new_tokens=400)))
        waiting = asyncio.create_task(rollout.generate(request(max_new_tokens=400)))
        await settle(rollout, passes, 5)
        await rollout.pause(PauseMode.ABORT)
        return await running, await waiting

    running, waiting = run(scenario())
    assert running.stop_reason is waiting.stop_reason is StopReason.ABORTED
    assert 5 <= len(running.token_ids) < 400
    assert len(running.token_ids) == len(running.logprobs) == len(running.versions)
    assert list(waiting.token_ids) == []


def test_a_new_version_while_requests_run_is_refused(model: Any, passes: list[int]) -> None:
    async def scenario() -> None:
        rollout = engine(model)
        task = asyncio.create_task(rollout.generate(request(max_new_tokens=80)))
        await settle(rollout, passes, 3)
        with pytest.raises(EngineError, match="pause"):
            await SharedWeights(rollout).push(FakePolicy(), 1)
        assert rollout.version == 0
        assert set((await task).versions) == {0}
        await SharedWeights(rollout).push(FakePolicy(), 1)
        assert rollout.version == 1

    run(scenario())


def test_a_pause_that_waits_includes_prompts_whose_first_pass_is_under_way(model: Any) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_a_cancelled_request_frees_its_place(model: Any, passes: list[int]) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_requests_cancelled_while_paused_do_not_keep_it_awake(model: Any, passes: list[int]) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_sleep_refuses_in_flight_and_gives_memory_back(model: Any, passes: list[int]) -> None:
    async def scenario() -> None:
        rollout = engine(model)
        task = asyncio.create_task(rollout.generate(request(max_new_tokens=80)))
        await settle(rollout, passes, 3)
        with pytest.raises(EngineError, match="in flight"):
            await rollout.sleep()
        first = await task
        assert rollout._decoder.cache.nbytes > 0
        await rollout.sleep()
        await rollout.sleep()
        assert rollout._decoder.cache.nbytes == 0
        await rollout.wake()
        again = await rollout.generate(request(max_new_tokens=80))
        assert list(again.token_ids) == list(first.token_ids)

    run(scenario())


def test_a_failing_step_reaches_every_caller_and_the_engine_lives_on(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    calls: list[int] = []

    def fail_once(module: Any, arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no room")

    model.model.norm.register_forward_pre_hook(fail_once)

    async def scenario() -> None:
        rollout = engine(model, max_batch_size=2)
        results = await asyncio.gather(*(rollout.generate(request(seed=s)) for s in range(5)), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert all("MemoryError: no room" in str(result) for result in results)
        assert isinstance(results[0].__cause__, MemoryError)  # type: ignore[union-attr]
        after = await gather(rollout, many(6))
        expected = await gather(engine(model), many(6))
        assert tokens(after) == tokens(expected)

    run(scenario())


def test_the_event_loop_stays_free(model: Any) -> None:
    """It does its work while the model computes a step."""
    answered: list[bool] = []

    async def scenario() -> None:
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

    run(scenario())
    assert len(answered) >= 20
    assert all(answered)


def test_generation_leaves_the_model_trainable(tiny_model_dir: Path) -> None:
    """The engine may share the trainer's module: what it computed may not get into autograd's way."""
    model = load(tiny_model_dir)
    rollout = engine(model)
    run(rollout.generate(request()))
    from rollgrad.adapters.models.torch.attention import ForestAttention
    from rollgrad.adapters.models.torch.layout import prefill_layout

    layout, _ = prefill_layout([(4, 5, 6)])
    plan = ForestAttention(layout.nodes, device=torch.device("cpu"), dtype=torch.float32)
    hidden = model.base_model(
        input_ids=layout.tokens_M[None], position_ids=layout.positions_M[None], use_cache=False, attention_plan=plan
    ).last_hidden_state
    hidden.sum().backward()
    assert all(parameter.grad is not None for parameter in model.base_model.parameters())


def test_a_window_is_kept_while_decoding(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=6,
        initializer_range=0.3,
        pad_token_id=0,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    asked = request((3, 4, 5, 6, 7, 8, 9, 10, 11), max_new_tokens=30)

    async def two_turns() -> tuple[Generation, GenerationRequest, Generation]:
        rollout = engine(load(tmp_path))
        first = await rollout.generate(evolve(asked, keep=True))
        more = continuation(asked.prompt_token_ids, first, seed=11)
        return first, more, await rollout.generate(more)

    first, more, second = run(two_turns())
    for turn, generation in ((asked, first), (more, second)):
        ids = torch.tensor([[*turn.prompt_token_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = plain(ids).logits[0, len(turn.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_versions_are_the_ones_in_place(model: Any) -> None:
    async def scenario() -> list[set[int]]:
        rollout = engine(model)
        seen = []
        for version in range(3):
            rollout.set_version(version)
            seen.append(
                set((await rollout.generate(evolve(request(), params=SamplingParams(max_new_tokens=3)))).versions)
            )
        return seen

    assert run(scenario()) == [{0}, {1}, {2}]


def continuation(prompt: Sequence[int], reply: Generation, *, seed: int) -> GenerationRequest:
    """The next turn: prompt, reply, and an observation of `seed` tokens."""
    return evolve(request((*prompt, *reply.token_ids, *range(60, 61 + seed)), seed=seed + 50), keep=True)


def continuations(first: Sequence[GenerationRequest], replies: Sequence[Generation]) -> list[GenerationRequest]:
    pairs = zip(first, replies, strict=True)
    return [continuation(asked.prompt_token_ids, reply, seed=index) for index, (asked, reply) in enumerate(pairs)]


def test_a_continued_sequence_computes_its_new_tokens_only(model: Any, passes: list[int]) -> None:
    async def scenario() -> tuple[list[GenerationRequest], list[Generation], list[int]]:
        rollout = engine(model)
        first = [evolve(asked, keep=True) for asked in many(9)]
        replies = await gather(rollout, first)
        asked = [
            continuation(a.prompt_token_ids, r, seed=i) for i, (a, r) in enumerate(zip(first, replies, strict=True))
        ]
        passes.clear()
        second = await gather(rollout, asked)
        return asked, second, list(passes)

    asked, second, computed = run(scenario())
    # One pass for what is new: the last sampled token and the observation of each, padded to the longest.
    assert computed[0] == 9 * (1 + 9)
    for turn, generation in zip(asked, second, strict=True):
        fresh = run(engine(model).generate(turn))
        assert list(fresh.token_ids) == list(generation.token_ids)
        torch.testing.assert_close(
            torch.tensor(fresh.logprobs), torch.tensor(generation.logprobs), rtol=1e-4, atol=1e-4
        )


def test_fresh_and_continued_prompts_are_admitted_together(model: Any) -> None:
    async def scenario() -> list[tuple[GenerationRequest, Generation]]:
        rollout = engine(model, max_batch_size=4)
        first = [evolve(asked, keep=True) for asked in many(6)]
        replies = await gather(rollout, first)
        asked = [
            continuation(a.prompt_token_ids, r, seed=i) for i, (a, r) in enumerate(zip(first, replies, strict=True))
        ]
        asked = [turn for pair in zip(asked, many(6), strict=True) for turn in pair]
        return list(zip(asked, await gather(rollout, asked), strict=True))

    for turn, generation in run(scenario()):
        assert list(run(engine(model).generate(turn)).token_ids) == list(generation.token_ids)


def test_new_weights_forget_what_was_kept(model: Any, passes: list[int]) -> None:
    async def scenario() -> tuple[GenerationRequest, list[int]]:
        rollout = engine(model)
        first = evolve(request(range(30, 70)), keep=True)
        asked = continuation(first.prompt_token_ids, await rollout.generate(first), seed=3)
        rollout.set_version(1)
        passes.clear()
        await rollout.generate(asked)
        return asked, list(passes)

    asked, computed = run(scenario())
    assert computed[0] == len(asked.prompt_token_ids)


def test_a_request_that_nothing_will_continue_is_not_kept(model: Any, passes: list[int]) -> None:
    async def scenario() -> tuple[GenerationRequest, list[int]]:
        rollout = engine(model)
        first = request(range(30, 70))
        asked = continuation(first.prompt_token_ids, await rollout.generate(first), seed=3)
        passes.clear()
        await rollout.generate(asked)
        return asked, list(passes)

    asked, computed = run(scenario())
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


def test_a_listener_hears_every_token_and_its_fault_is_its_own(model: Any) -> None:
    heard: list[int] = []

    def broken(token: int) -> None:
        raise ValueError("deaf")

    async def scenario() -> tuple[Generation, Any, Generation]:
        rollout = engine(model)
        first, second, third = await asyncio.gather(
            rollout.generate(request(seed=1), on_token=heard.append),
            rollout.generate(request(seed=2), on_token=broken),
            rollout.generate(request(seed=3)),
            return_exceptions=True,
        )
        assert isinstance(first, Generation)
        assert isinstance(third, Generation)
        return first, second, third

    first, second, third = run(scenario())
    assert heard == list(first.token_ids)
    assert isinstance(second, ValueError)
    assert len(third.token_ids) == 12
