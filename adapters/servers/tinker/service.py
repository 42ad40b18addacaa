"""Sessions, training runs and samplers of the Tinker API, over the ports of models and engines.

Invariants: requests of a run are worked on one after the other, in the order in which they came; all training is on one
thread; the weights that a sampler samples from never change. Does not own: messages (`wire.py`), routes (`server.py`),
results (`results.py`).
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from attrs import define, evolve, field
from torch import Tensor

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.tinker import wire
from rollgrad.adapters.servers.tinker.results import Answer, Results
from rollgrad.adapters.servers.tinker.samplers import Sampler, Samplers, Weights
from rollgrad.adapters.servers.tinker.shelf import SAMPLER, STATE, Description, Shelf
from rollgrad.application.learning.requested import RequestedTraining
from rollgrad.domain.ports.models import StepwisePolicy

SESSION_SECONDS = 600.0
"""Seconds without a sign of life, which clients give every 10, after which a session's models are freed."""

MOST_RANK = 512
"""Largest rank of adapters, vLLM's: one that is no number of theirs would take the memory of all runs."""
MOST_SAMPLES = 4096
"""Most samples of one request, each of which is a request to the engine."""

UNEMBEDDING = (
    "rollgrad puts adapters on the linear layers of attention and MLP; train_unembed has no effect: the output "
    "embedding stays as it is."
)

Result = TypeVar("Result")

_log = structlog.get_logger()


class Models(Protocol):
    """Makes models on one base model."""

    name: str
    """Name of the base model, by which clients ask for it."""
    architecture: str
    """Kind of the base model."""
    vocabulary: int
    """Number of its tokens."""
    max_tokens: int | None
    """Tokens of a sequence at most; None if the model does not say."""
    pass_tokens: int
    """Tokens of a forward pass in training."""

    def create(self, rank: int, seed: int) -> StepwisePolicy:
        """Returns the base model with fresh adapters."""
        ...

    def save_state(self, policy: StepwisePolicy, directory: Path) -> None:
        """Writes adapters and the state of their optimizer."""
        ...

    def load_state(self, policy: StepwisePolicy, directory: Path, *, optimizer: bool) -> None:
        """Loads what `save_state` has written; without `optimizer` the weights alone."""
        ...

    def save_adapter(self, policy: StepwisePolicy, directory: Path) -> None:
        """Writes the adapters, in peft's format."""
        ...

    def sampler(self, weights: Weights) -> Sampler:
        """Returns the base model with saved adapters, or as it is."""
        ...


@define(eq=False)
class Run:
    """A model in training, and whose turn it is."""

    training: RequestedTraining
    description: Description
    turn: asyncio.Lock = field(factory=asyncio.Lock)


class TinkerService:
    """Works on requests. All methods are called in one event loop; they raise `HttpError` for what is refused at
    once."""

    def __init__(self, models: Models, shelf: Shelf) -> None:
        self.models = models
        self.shelf = shelf
        self.results = Results()
        self._sessions: dict[str, float] = {}
        """Time of each session's last sign of life."""
        self._runs: dict[str, Run] = {}
        self._samplers = Samplers(lambda weights: self._work(partial(models.sampler, weights)))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tinker-training")

    def create_session(self) -> str:
        """Returns the id of a new session, after freeing those whose clients are gone."""
        now = time.monotonic()
        for silent in [session_id for session_id, seen in self._sessions.items() if now - seen > SESSION_SECONDS]:
            self.finish(silent)
        session_id = secrets.token_hex(8)
        self._sessions[session_id] = now
        return session_id

    def heartbeat(self, session_id: str) -> None:
        """Notes a sign of life."""
        self._check_session(session_id)
        self._sessions[session_id] = time.monotonic()

    def finish(self, session_id: str) -> None:
        """Frees the models of a session, whose checkpoints stay; does nothing if it is unknown."""
        self._sessions.pop(session_id, None)
        self.results.forget(f"{session_id}:")
        for found in [*self._runs]:
            if _session_of(found) == session_id:
                del self._runs[found]
        for found in self._samplers:
            if _session_of(found) == session_id:
                self._samplers.drop(found)
                self.shelf.drop_snapshot(found)

    def create_model(self, request: Any) -> tuple[str, str]:
        """Begins a training run; returns the request's id and the run's."""
        self._check_session(request.session_id)
        self._check_base(request.base_model)
        _check_optimizer(request.optimizer_config)
        lora = request.lora_config
        if lora is None:
            raise wire.unsupported("training without LoRA", "set lora_config, or use rollgrad train")
        _check_range("The rank", lora.rank, MOST_RANK)
        if not (lora.train_attn and lora.train_mlp):
            raise wire.unsupported("LoRA on a part of the layers", "leave out train_attn and train_mlp")
        if lora.train_unembed:
            _log.warning(UNEMBEDDING)
        run_id = f"{request.session_id}:train:{request.model_seq_id}"
        seed = secrets.randbits(31) if lora.seed is None else lora.seed % 2**63
        description = Description(
            base_model=self.models.name, lora_rank=lora.rank, user_metadata=_texts(request.user_metadata)
        )

        async def create() -> Answer:
            policy = await self._work(partial(self.models.create, lora.rank, seed))
            self._add_run(run_id, policy, description)
            return {"type": "create_model", "model_id": run_id}

        self.results.start(f"{run_id}:0", create())
        return f"{run_id}:0", run_id

    def load_model(self, request: Any) -> tuple[str, str]:
        """Begins a training run from a checkpoint, or loads one into a run; returns the request's id and the run's."""
        if request.weights_access_token:
            raise wire.unsupported("weights_access_token", "this server has one account")
        _check_optimizer(request.optimizer_config)
        directory, saved = self.shelf.find(request.path, STATE)
        self._check_base(request.base_model or saved.base_model)
        self._check_base(saved.base_model)
        if request.model_id is not None:
            run = self._run(request.model_id)
            if run.description.lora_rank != saved.lora_rank:
                raise HttpError(400, f"{request.path} has the rank {saved.lora_rank}, not {run.description.lora_rank}.")
            load = partial(self._load, run, directory, optimizer=request.optimizer)
            answer = {"type": "load_weights", "path": request.path, "model_id": request.model_id}
            return self._in_turn(request.model_id, request.seq_id, load, lambda _: answer), request.model_id
        self._check_session(request.session_id)
        run_id = f"{request.session_id}:train:{request.model_seq_id}"
        description = evolve(saved, user_metadata=_texts(request.user_metadata))

        def made() -> StepwisePolicy:
            policy = self.models.create(saved.lora_rank, 0)
            self.models.load_state(policy, directory, optimizer=request.optimizer)
            return policy

        async def create() -> Answer:
            self._add_run(run_id, await self._work(made), description)
            return {"type": "load_weights", "path": request.path, "model_id": run_id}

        self.results.start(f"{run_id}:0", create())
        return f"{run_id}:0", run_id

    def forward_backward(self, request: wire.ForwardBackward) -> str:
        """Adds a gradient, or scores; returns the request's id. It is read when its turn comes: if it is refused, the
        step that was sent after it must not be taken."""
        training = self._run(request.model_id).training

        def work() -> tuple[list[Tensor], float]:
            datums, objective = request.read(self.models.vocabulary)
            return (training.forward if request.forward_only else training.forward_backward)(datums, objective)

        return self._in_turn(
            request.model_id,
            request.sequence,
            work,
            lambda found: wire.forward_backward_output(*found),
            failed=None if request.forward_only else training.spoil,
        )

    def optim_step(self, request: Any) -> str:
        """Takes an optimizer step; returns the request's id. It is read when its turn comes: if it is refused, the
        next step must not take its gradient."""
        training = self._run(request.model_id).training
        return self._in_turn(
            request.model_id,
            request.seq_id,
            lambda: training.step(wire.read_rates(request)),
            lambda metrics: {"metrics": metrics},
            failed=training.clear,
        )

    def save_state(self, request: Any) -> str:
        """Saves weights and the optimizer's state; returns the request's id."""
        run = self._run(request.model_id)
        write = partial(self.models.save_state, run.training.policy)
        save = partial(
            self.shelf.write,
            *(request.model_id, STATE, request.path or f"{request.seq_id or 0:06}", _described(run, request), write),
            overwrite=request.overwrite,
        )
        return self._in_turn(
            request.model_id, request.seq_id, save, lambda path: {"type": "save_weights", "path": path}
        )

    def save_for_sampler(self, request: Any) -> str:
        """Saves weights to sample from, by name or for one sampler; returns the request's id."""
        if request.kind != "snapshot":
            raise wire.unsupported(f"kind={request.kind!r}", "leave kind out, for weights that stay")
        run = self._run(request.model_id)
        write = partial(self.models.save_adapter, run.training.policy)
        kind = {"type": "save_weights_for_sampler"}
        if request.path is not None:
            save: Callable[[], Any] = partial(
                self.shelf.write,
                *(request.model_id, SAMPLER, request.path, _described(run, request), write),
                overwrite=False,
            )
            return self._in_turn(request.model_id, request.seq_id, save, lambda path: {**kind, "path": path})
        sampler_id = f"{_session_of(request.model_id)}:sample:{request.sampling_session_seq_id}"

        def add(directory: Path) -> Answer:
            self._samplers.add(sampler_id, Weights(directory=directory, rank=run.description.lora_rank))
            return {**kind, "sampling_session_id": sampler_id}

        return self._in_turn(request.model_id, request.seq_id, partial(self.shelf.snapshot, sampler_id, write), add)

    def create_sampler(self, request: Any) -> str:
        """Returns the id of a sampler of the base model, or of saved weights."""
        self._check_session(request.session_id)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if request.model_path is None:
            self._check_base(request.base_model)
            self._samplers.add(sampler_id, Weights())
            return sampler_id
        directory, saved = self.shelf.find(request.model_path, SAMPLER)
        self._check_base(saved.base_model)
        self._samplers.add(sampler_id, Weights(directory=directory, rank=saved.lora_rank, path=request.model_path))
        return sampler_id

    def sample(self, request: Any) -> tuple[str, list[str]]:
        """Samples; returns the request's id, and one id a sample."""
        if request.sampling_session_id is None:
            raise wire.unsupported("sampling without a sampling session", "create a SamplingClient")
        if request.seq_id is None:
            raise _unnumbered("of a sampling session")
        self.weights(request.sampling_session_id)
        prompt = wire.read_prompt(request)
        if not 0 <= min(prompt) <= max(prompt) < self.models.vocabulary:
            raise HttpError(400, f"The prompt has a token outside of 0 to {self.models.vocabulary - 1}.")
        _check_range("num_samples", request.num_samples, MOST_SAMPLES)
        room = None if self.models.max_tokens is None else self.models.max_tokens - len(prompt)
        params = wire.read_sampling(request, secrets.randbits(61), room)
        request_id = f"{request.sampling_session_id}:{request.seq_id}"
        count, scored = request.num_samples, bool(request.prompt_logprobs)

        async def sample() -> Answer:
            found = await self._samplers.sample(request.sampling_session_id, prompt, params, count, scored=scored)
            return wire.sample_output(*found)

        self.results.start(request_id, sample())
        return request_id, [f"{request_id}:{number}" for number in range(request.num_samples)]

    def weights(self, sampler_id: str) -> Weights:
        """Returns the origin of a sampler.

        Raises:
            HttpError: 404, there is none.
        """
        return _present(self._samplers.weights(sampler_id), sampler_id, "sampler")

    def description(self, run_id: str) -> Description:
        """Returns the description of a run in memory.

        Raises:
            HttpError: 404, there is none.
        """
        return self._run(run_id).description

    def close(self) -> None:
        """Waits for the work under way."""
        self._worker.shutdown()

    def _in_turn(
        self,
        run_id: str,
        sequence: int | None,
        work: Callable[[], Result],
        answer: Callable[[Result], Answer],
        failed: Callable[[], None] | None = None,
    ) -> str:
        """Starts a run's work when its turn comes; returns the request's id. If the work fails or is cancelled,
        `failed` is called on the thread of all training, after it and before that of the next request."""
        run = self._run(run_id)
        if not sequence or sequence < 0:  # it would have the id of another request, and that one's answer
            raise _unnumbered("of a training run, from 1")
        request_id = f"{run_id}:{sequence}"

        async def wait_and_work() -> Answer:
            turn, done = asyncio.ensure_future(run.turn.acquire()), False

            def over(_: asyncio.Future[Any]) -> None:
                if turn.cancelled():  # the server ends
                    return
                if failed is not None and not done:
                    self._worker.submit(failed)  # a cancelled request's work may still be going on there
                run.turn.release()

            try:
                await asyncio.shield(turn)  # a request that is cancelled keeps its place, in which it fails
                found = answer(await self._work(work))
                done = True
                return found
            finally:
                turn.add_done_callback(over)

        self.results.start(request_id, wait_and_work())
        return request_id

    async def _work(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _load(self, run: Run, directory: Path, *, optimizer: bool) -> None:
        run.training.clear()
        self.models.load_state(run.training.policy, directory, optimizer=optimizer)

    def _add_run(self, run_id: str, policy: StepwisePolicy, description: Description) -> None:
        self.shelf.add_run(run_id, description)
        self._runs[run_id] = Run(RequestedTraining(policy, self.models.pass_tokens), description)

    def _check_session(self, session_id: str) -> None:
        _present(self._sessions.get(session_id), session_id, "session")

    def _run(self, run_id: str) -> Run:
        return _present(self._runs.get(run_id), run_id, "training run")

    def _check_base(self, name: str | None) -> None:
        if name != self.models.name:
            raise HttpError(
                400, f"The base model is {name!r}, but this server has {self.models.name!r} alone.", code="wrong_model"
            )


def _described(run: Run, request: Any) -> Description:
    """Returns the description of a run's checkpoint."""
    return evolve(run.description, user_metadata={**run.description.user_metadata, **(request.user_metadata or {})})


def _unnumbered(which: str) -> HttpError:
    return HttpError(400, f"seq_id is not set: number the requests {which}.", code="invalid_request")


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise HttpError(400, f"{name} is {value}, but it must be from 1 to {most}.", code="invalid_request")


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (metadata or {}).items()}


def _session_of(model_or_sampler: str) -> str:
    return model_or_sampler.partition(":")[0]


def _check_optimizer(config: Any) -> None:
    if config is not None and config.type != "adamw":
        raise wire.unsupported(f"the optimizer {config.type!r}", "use AdamW, the default")


def _present(value: Result | None, key: str, what: str) -> Result:
    if value is None:
        raise HttpError(404, f"There is no {what} {key!r}: the server has been started again, or its session ended.")
    return value
