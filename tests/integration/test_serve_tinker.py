"""`rollgrad serve tinker`: the real client, the package `tinker`, against the server on a real socket."""

import asyncio
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from rollgrad.adapters.models.torch.stepwise import with_own_adapters
from rollgrad.adapters.servers.server import Server
from rollgrad.adapters.servers.tinker.server import create_tinker_app
from rollgrad.adapters.servers.tinker.service import TinkerService
from rollgrad.adapters.servers.tinker.shelf import Shelf
from rollgrad.application.settings.sections.actor import DType, LoraConfig
from rollgrad.entrypoints.composition.serving.tinker import TinkerModels

KEY = "tml-test"
STOP_SECONDS = 120
RANK, SEED = 4, 3
WORDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path) -> TinkerModels:
    return TinkerModels(str(tiny_model_dir), DType.FLOAT32, pass_tokens=16)


@contextmanager
def serving(models: TinkerModels, directory: Path, snapshots: Path) -> Iterator[str]:
    """A server in a thread of its own, because the client's calls wait for it."""
    service = TinkerService(models, Shelf(directory, snapshots))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = Server(create_tinker_app(service), host="127.0.0.1", port=0, token=KEY, name="Tinker server")
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        service.close()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def url(models: TinkerModels, shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(models, shelf, tmp_path_factory.mktemp("snapshots")) as found:
        yield found


@contextmanager
def connected(url: str) -> Iterator[Any]:
    """The client, whose telemetry goes to the server, too."""
    import tinker

    with tinker.ServiceClient(base_url=url, api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with connected(url) as found:
        yield found


@pytest.fixture
def training(client: Any, models: TinkerModels) -> Any:
    return client.create_lora_training_client(base_model=models.name, rank=RANK, seed=SEED).result()


def datum(tokens: list[int], **columns: list[float]) -> Any:
    """The datum of a sequence, its targets one token on."""
    import tinker

    inputs = {"target_tokens": tokens[1:], **columns}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def likely(tokens: list[int]) -> Any:
    return datum(tokens, weights=[1.0] * (len(tokens) - 1))


def adam(**settings: float) -> Any:
    import tinker

    return tinker.AdamParams(**{"learning_rate": 1e-2, **settings})


def plain_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def scored(sampler: Any, tokens: list[int]) -> list[float]:
    """Log-probs of all tokens but the first, by the sampler."""
    import tinker

    first, *rest = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    assert first is None or math.isnan(first)
    return list(rest)


def test_training_equals_torch_on_the_plain_model(training: Any, models: TinkerModels) -> None:
    """Log-probs, loss, three steps of AdamW, and the log-probs of what is sampled from afterwards."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(models.name, dtype=torch.float32)
    model = with_own_adapters(plain, LoraConfig(rank=RANK), seed=SEED)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-12,
        weight_decay=0.0,
    )
    sequences = [WORDS, WORDS[2:], [40, 41]]
    for _ in range(3):
        gradient = training.forward_backward([likely(tokens) for tokens in sequences], "cross_entropy")
        step = training.optim_step(adam())
        expected = [plain_logprobs(model, tokens) for tokens in sequences]
        output = gradient.result()
        for found, theirs in zip(output.loss_fn_outputs, expected, strict=True):
            assert found["logprobs"].data == pytest.approx(theirs.tolist(), abs=1e-4)
        loss = -torch.cat(expected).sum()
        assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), abs=1e-3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step.result().metrics["grad_norm"] > 0
    sampler = training.save_weights_and_get_sampling_client().result()
    assert scored(sampler, WORDS) == pytest.approx(plain_logprobs(model, WORDS).tolist(), abs=1e-3)


def test_what_is_sampled_has_the_log_probs_of_the_weights(training: Any) -> None:
    import tinker

    training.forward_backward([likely(WORDS)], "cross_entropy").result()
    training.optim_step(adam()).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(WORDS[:3])
    params = tinker.SamplingParams(max_tokens=5, seed=1)
    found = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
    assert len({sequence.sequence_id for sequence in found.sequences}) == 3
    assert len({tuple(sequence.tokens) for sequence in found.sequences}) > 1
    for sequence in found.sequences:
        assert sequence.logprobs == pytest.approx(scored(sampler, WORDS[:3] + sequence.tokens)[2:], abs=1e-4)
    again = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
    assert [sequence.tokens for sequence in again.sequences] == [sequence.tokens for sequence in found.sequences]


def test_stops_end_a_reply(training: Any, models: TinkerModels) -> None:
    import tinker

    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(WORDS)

    def reply(**settings: Any) -> Any:
        params = tinker.SamplingParams(max_tokens=8, temperature=0.0, **settings)
        return sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0]

    whole = reply()
    assert (whole.stop_reason, len(whole.tokens)) == ("length", 8)
    first = whole.tokens[0]
    assert reply(stop=[first]).tokens == [first]
    assert reply(stop=[first]).stop_reason == "stop"
    text = training.get_tokenizer().decode([first])
    assert reply(stop=text).tokens == [first]


def test_a_sampler_keeps_its_weights(training: Any) -> None:
    sampler = training.save_weights_and_get_sampling_client().result()
    before = scored(sampler, WORDS)
    training.forward_backward([likely(WORDS)], "cross_entropy").result()
    training.optim_step(adam()).result()
    assert scored(sampler, WORDS) == before
    assert sum(scored(training.save_weights_and_get_sampling_client().result(), WORDS)) > sum(before)


def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_ended(
    client: Any, training: Any, models: TinkerModels, shelf: Path, tmp_path: Path
) -> None:
    """Also on another server, which has the directory alone; without the optimizer it goes on from its weights."""
    import tinker

    def step(of: Any, **settings: float) -> list[float]:
        of.forward_backward([likely(WORDS)], "cross_entropy").result()
        of.optim_step(adam(**settings)).result()
        output = of.forward([likely(WORDS)], "cross_entropy").result()
        return list(output.loss_fn_outputs[0]["logprobs"].data)

    weights = step(training)
    path = training.save_state("first").result().path
    sampled = training.save_weights_for_sampler("first").result().path
    assert path.startswith("tinker://")
    with pytest.raises(tinker.TinkerError, match="choose another name"):
        training.save_state("first").result()
    again = training.save_state("first", overwrite=True).result()
    assert again.path == path
    expected = step(training)
    with serving(models, shelf, tmp_path) as url, connected(url) as later:
        resumed = later.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.get_info().lora_rank == RANK
        assert step(resumed) == pytest.approx(expected, abs=1e-6)
        fresh = later.create_training_client_from_state(path).result()
        assert step(fresh, learning_rate=0.0) == pytest.approx(weights, abs=1e-6)
        assert step(fresh) != pytest.approx(expected, abs=1e-6), "its moments are new"
        sampler = later.create_sampling_client(model_path=sampled).result()
        assert scored(sampler, WORDS) == pytest.approx(weights, abs=1e-4)
        assert sampler.get_base_model() == models.name
        run = tinker.RestClient(base_url=url, api_key=KEY).get_training_run_by_tinker_path(path).result()
        assert (run.base_model, run.lora_rank) == (models.name, RANK)


def test_saved_adapters_are_pefts_own(training: Any, models: TinkerModels, shelf: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    training.forward_backward([likely(WORDS)], "cross_entropy").result()
    training.optim_step(adam()).result()
    path = training.save_weights_for_sampler("peft").result().path
    directory = shelf / path.removeprefix("tinker://").replace(":", "-")
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(models.name, dtype="float32"), str(directory)
    )
    output = training.forward([likely(WORDS)], "cross_entropy").result()
    with torch.no_grad():
        expected = plain_logprobs(model, WORDS)
    assert output.loss_fn_outputs[0]["logprobs"].data == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_loss_of_the_clients_own(training: Any, client: Any, models: TinkerModels) -> None:
    """A loss that the client differentiates has the same step as the server's."""
    other = client.create_lora_training_client(base_model=models.name, rank=RANK, seed=SEED).result()

    def own(data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {"mine": 1.0}

    metrics = training.forward_backward_custom([likely(WORDS)], own).result().metrics
    assert metrics["mine"] == 1.0
    other.forward_backward([likely(WORDS)], "cross_entropy").result()
    for each in (training, other):
        each.optim_step(adam()).result()
    after = [each.forward([likely(WORDS)], "cross_entropy").result() for each in (training, other)]
    first, second = (output.loss_fn_outputs[0]["logprobs"].data for output in after)
    assert first == pytest.approx(second, abs=1e-6)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_what_was_rewarded_becomes_likely(training: Any, loss: str) -> None:
    """Reinforcement learning of one token, whose reward is 1 and that of all others 0."""
    import tinker

    prompt, wanted = WORDS[:2], 30
    chances = []
    for seed in range(4):
        sampler = training.save_weights_and_get_sampling_client().result()
        sequences = (
            sampler.sample(
                prompt=tinker.ModelInput.from_ints(prompt),
                num_samples=8,
                sampling_params=tinker.SamplingParams(max_tokens=1, seed=seed),
            )
            .result()
            .sequences
        )
        # The wanted token is rare at first: it is shown beside what was sampled.
        replies = [(sequence.tokens[0], sequence.logprobs[0], -0.1) for sequence in sequences]
        replies.append((wanted, scored(sampler, [*prompt, wanted])[-1], 1.0))
        chances.append(math.exp(replies[-1][1]))
        data = [
            datum([*prompt, token], logprobs=[0.0, logprob], advantages=[0.0, advantage])
            for token, logprob, advantage in replies
        ]
        training.forward_backward(data, loss).result()
        training.optim_step(adam(learning_rate=3e-2)).result()
    assert chances == sorted(chances)
    assert chances[-1] > 10 * chances[0]


def test_what_is_not_supported_is_refused_by_its_name(client: Any, training: Any, models: TinkerModels) -> None:
    import tinker

    def message(work: Callable[[], Any]) -> str:
        with pytest.raises(tinker.TinkerError) as caught:
            work().result()
        return str(caught.value)

    data = [datum(WORDS, logprobs=[0.0] * 5, advantages=[1.0] * 5)]
    sampler = client.create_sampling_client(base_model=models.name).result()
    prompt, params = tinker.ModelInput.from_ints(WORDS), tinker.SamplingParams(max_tokens=1)

    def sample(**settings: Any) -> Any:
        return sampler.sample(**{"prompt": prompt, "num_samples": 1, "sampling_params": params, **settings})

    def new(**settings: Any) -> Any:
        return client.create_lora_training_client(**{"base_model": models.name, "rank": RANK, **settings})

    said = {
        "stable_reinforce": message(lambda: training.forward_backward(data, "stable_reinforce")),
        "gspo": message(lambda: training.forward_backward(data, "gspo")),
        "needs loss_fn_config beta": message(lambda: training.forward_backward(data, "dro")),
        "no_such": message(lambda: training.forward_backward(data, "ppo", {"no_such": 1.0})),
        "reads target_tokens, weights": message(lambda: training.forward_backward(data, "cross_entropy")),
        "outside of": message(lambda: training.forward_backward([likely([1, 10**6])], "cross_entropy")),
        "a part of the gradient": message(lambda: training.optim_step(adam())),
        "no gradient": message(lambda: training.optim_step(adam())),
        "optimizer 'dimuon'": message(lambda: new(optimizer=tinker.types.DimuonOptimizerConfig())),
        "train_mlp": message(lambda: new(train_mlp=False)),
        "this server has": message(lambda: new(base_model="Qwen/Qwen3-8B")),
        "There is no tinker://": message(lambda: client.create_training_client_from_state("tinker://a/weights/b")),
        "is no checkpoint": message(lambda: client.create_training_client_from_state("tinker://a/weights/..")),
        "needs sampler_weights": message(lambda: client.create_sampling_client(model_path="tinker://a/weights/b")),
        "letters, digits": message(lambda: training.save_state("../there")),
        "inflight": message(lambda: training.save_weights_and_get_sampling_client(kind="inflight")),
        "topk_sample_logprobs": message(lambda: sample(topk_sample_logprobs=2)),
        "stop=[]": message(lambda: sample(sampling_params=tinker.SamplingParams(max_tokens=1, stop=[]))),
        "positions": message(lambda: sample(sampling_params=tinker.SamplingParams(max_tokens=10**6))),
        "no tokens": message(lambda: sample(prompt=tinker.ModelInput.empty())),
        "num_samples is 5000, but it must be from 1 to 4096": message(lambda: sample(num_samples=5000)),
        "The rank is 1000000, but it must be from 1 to 512": message(lambda: new(rank=10**6)),
    }
    for part, text in said.items():
        assert part in text, said
    # After all that the run is as it was.
    training.forward_backward([likely(WORDS)], "cross_entropy").result()
    training.optim_step(adam()).result()


def test_a_step_that_was_sent_before_a_gradient_failed_is_not_taken(training: Any) -> None:
    """The client sends all requests before it looks at the first answer."""
    import tinker

    def logprobs() -> list[float]:
        output = training.forward([likely(WORDS)], "cross_entropy").result()
        return list(output.loss_fn_outputs[0]["logprobs"].data)

    before = logprobs()
    for broken in ([1, 10**6], [1, 2, -1]):
        sent = [training.forward_backward([likely(tokens)], "cross_entropy") for tokens in (WORDS, broken, WORDS[::-1])]
        step = training.optim_step(adam())
        with pytest.raises(tinker.TinkerError, match="outside of"):
            sent[1].result()
        with pytest.raises(tinker.TinkerError, match="a part of the gradient"):
            step.result()
        assert sent[2].result().loss_fn_outputs
        assert logprobs() == before
    training.forward_backward([likely(WORDS)], "cross_entropy").result()
    training.optim_step(adam()).result()
    assert sum(logprobs()) > sum(before)


def test_a_refused_step_leaves_no_gradient(training: Any, client: Any, models: TinkerModels) -> None:
    """The client sends all requests before it looks at the first answer, and the next step is that of a run without
    the refused one."""
    import tinker

    def stepped(training: Any) -> list[float]:
        training.forward_backward([likely(WORDS)], "cross_entropy")
        training.optim_step(adam()).result()
        output = training.forward([likely(WORDS)], "cross_entropy").result()
        return list(output.loss_fn_outputs[0]["logprobs"].data)

    training.forward_backward([likely(WORDS[::-1])], "cross_entropy")
    refused = training.optim_step(adam(beta2=1.0))
    other = client.create_lora_training_client(base_model=models.name, rank=RANK, seed=SEED).result()
    assert stepped(training) == stepped(other)
    with pytest.raises(tinker.TinkerError, match="beta2 is 1"):
        refused.result()


def test_the_session_ends_with_its_client(url: str, models: TinkerModels) -> None:
    import tinker

    with connected(url) as client:
        training = client.create_lora_training_client(base_model=models.name, rank=RANK).result()
        model_id = training.model_id
    asked = httpx2.post(
        f"{url}/api/v1/get_info", json={"model_id": model_id}, headers={"x-api-key": KEY}, timeout=STOP_SECONDS
    )
    assert asked.status_code == 404
    assert "session ended" in asked.json()["error"]["message"]
    capabilities = tinker.RestClient(base_url=url, api_key=KEY).get_server_capabilities().result()
    assert [model.model_name for model in capabilities.supported_models] == [models.name]


def test_a_request_that_came_twice_is_worked_on_once(url: str, training: Any) -> None:
    """A client sends again what it has no answer to, with the same number."""
    training.forward_backward([likely(WORDS)], "cross_entropy").result()
    step = {"model_id": training.model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
    with httpx2.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, timeout=STOP_SECONDS) as http:
        first, second = (http.post("/optim_step", json=step).json() for _ in range(2))
        assert first == second
        results = [http.post("/retrieve_future", json={"request_id": first["request_id"]}).json() for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["metrics"]["grad_norm"] > 0


def test_a_request_without_a_number_is_refused(url: str, training: Any) -> None:
    """It could not be told from another one, whose answer it would have."""
    step = {"model_id": training.model_id, "adam_params": {"learning_rate": 1e-2}}
    with httpx2.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, timeout=STOP_SECONDS) as http:
        asked = http.post("/optim_step", json=step)
    assert asked.status_code == 400
    assert "seq_id is not set" in asked.json()["error"]["message"]


def test_the_command_serves_until_a_signal(rollgrad_command: list[str], tiny_model_dir: Path, tmp_path: Path) -> None:
    words = ["serve", "tinker", "--model", str(tiny_model_dir), "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen(
        [*rollgrad_command, *words, "--output_dir", str(tmp_path / "saved")],
        env={**os.environ, "ROLLGRAD_TOKEN": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.communicate()
        assert httpx2.get(f"{url}/api/v1/healthz", timeout=STOP_SECONDS).status_code == 401
        with connected(url) as client:
            training = client.create_lora_training_client(base_model=str(tiny_model_dir), rank=1).result()
            training.save_state("start").result()
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=STOP_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stdout) == (0, ""), stderr
    assert [path.name for path in (tmp_path / "saved").glob("*/weights/*")] == ["start"]
    assert KEY not in stderr
