"""vLLM behind a URL, as `vllm serve` starts it; and, for sampling alone, any server with OpenAI's completions in token
ids.

The abilities of a server are tested, not configured: `probe` lets it sample, `require_images` shows it an image,
`require_weights` lets it map this machine's shared memory, or a file. Does not own: the state of a rollout engine
(`adapters.engines.vllm.engine`).
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from attrs import evolve

from rollgrad.adapters.chat.image_files import blank
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.engines.vllm.async_llm import cache_salt
from rollgrad.adapters.engines.vllm.core import Core
from rollgrad.adapters.engines.vllm.plugin import BACKEND
from rollgrad.adapters.engines.vllm_server.client import ServerClient
from rollgrad.adapters.engines.vllm_server.endpoints import CompletionsWire, JoinedAnswer, TokensWire, Wire, places
from rollgrad.adapters.engines.vllm_server.images import check_expanded, data_uris, image_fields
from rollgrad.adapters.weights.receiver_port import EngineModel
from rollgrad.adapters.weights.shared_buckets import ALIGNMENT, DIRECTORY, SharedMemory
from rollgrad.application.engines.fleet_member import Listener
from rollgrad.application.foreign import foreign_code
from rollgrad.application.settings.quantized import quantized_by
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError

log = structlog.get_logger(__name__)

PROBE_SECONDS = 120.0
"""Longest that a server may take for one call of the probe: its first reply may have to warm up."""

PROBE_TOKENS = 8
"""Number of tokens of the probe's reply."""

NO_SUCH_PATH = frozenset({404, 405})
"""Statuses of an endpoint that a server does not have."""

REFUSALS = range(400, 500)
"""Statuses of a request that a server can never answer."""

SERVER_INFO = "/server_info?config_format=json"

GRAMMARS_FOLLOWED_ALIKE = ("auto", "guidance")
"""vLLM's backends of structured outputs that allow the tokens which the trainer finds again: `auto` takes guidance for
grammars with llguidance's directives, which xgrammar refuses."""

UNSEEN_MEMORY = (
    "start it on the machine that trains, in the same container, or let weights go through files that both machines "
    "have (--rollout.server_sync disk)."
)
UNSEEN_FILES = (
    "point --ckpt.output_dir to a file system that its machine has, too, at the same path, and may write to, or start "
    "it on the machine that trains."
)


class ServedCore(Core):
    """A `Core` behind a URL. `probe` must be called before anything else; without `require_weights` it only samples.

    Args:
        url: address of the server.
        vocabulary: token ids below it are tokens.
        max_requests: number of requests that the server is given at once; others wait here.
        flag: setting that names the server.
    """

    def __init__(self, url: str, *, vocabulary: int, max_requests: int, flag: str) -> None:
        self._flag = flag
        self.http = ServerClient(url)
        """Client of the server."""
        self.max_tokens = None
        self.model = EngineModel(torch.float32, vocabulary)
        self._wire: Wire = TokensWire()
        self._slots = asyncio.Semaphore(max_requests)
        self._health = "/health"
        self._version = self._part = 0
        self._aborts = 0
        self.names: tuple[str, ...] = ()
        """Names that the server has for its model: what requests call it and, where it tells, its directory."""
        self.processed = False
        """Whether log-probs are of the distribution that is sampled, not of the logits alone."""
        self._controlled = False
        self._follows = GRAMMARS_FOLLOWED_ALIKE[0]
        """Backend of structured outputs there, as far as it is known."""
        self._client = secrets.token_hex(8)  # another may have left keys, values and features of other weights there
        self._renderer: ImageRenderer | None = None

    async def probe(self) -> None:
        """Finds out how the server samples. A pause that a run left behind is ended.

        Raises:
            EngineError: it does not answer.
            ConfigurationError: it does not tell the tokens that it samples, or their log-probs.
        """
        models = await self.http.call("/v1/models", seconds=PROBE_SECONDS, repeat=True)
        with foreign_code(lambda _: EngineError(f"The server {self.http.url} lists no model under /v1/models.")):
            card = models["data"][0]
            self.max_tokens = card.get("max_model_len")
            self.names = tuple(str(card[key]) for key in ("id", "root") if card.get(key))
            wires: tuple[Wire, ...] = (TokensWire(), CompletionsWire(card["id"]))
        status, _ = await self.http.ask(self._health, seconds=PROBE_SECONDS)
        self._health = "/v1/models" if status in NO_SUCH_PATH else self._health
        status, answer = await self.http.ask("/is_paused", seconds=PROBE_SECONDS)
        if status == 200 and isinstance(answer, dict) and answer.get("is_paused"):
            await self.thaw()
        for wire in wires:
            if await self._samples_by(wire):
                break
        if self._renderer is not None:
            await self.require_images(self._renderer)

    async def _samples_by(self, wire: Wire) -> bool:
        """Returns whether it has this endpoint, which is then used."""
        self._wire = wire
        params = SamplingParams(top_k=1, max_new_tokens=PROBE_TOKENS)
        request = GenerationRequest(prompt_token_ids=(self.model.vocabulary // 2,), params=params)
        body = wire.body("rollgrad-probe", request, frozenset())
        status, answer = await self.http.ask(wire.path, body, seconds=PROBE_SECONDS, repeat=True)
        if isinstance(wire, TokensWire) and status in NO_SUCH_PATH:
            return False
        if status != 200:
            raise EngineError(self.http.refusal(wire.path, status, answer))
        try:
            generation = self._read(wire, answer, 0)
        except EngineError as error:
            raise ConfigurationError(
                f"{self._flag} names {self.http.url}, which does not tell what it samples in token ids with "
                f"their log-probs ({error}), and text cannot be turned back into the tokens it was: start a server "
                "that does, vLLM's with --enable-scale-out."
            ) from error
        self.processed = all(logprob == 0 for logprob in generation.logprobs)  # of one token out of one
        return True

    async def require_images(self, renderer: ImageRenderer) -> None:
        """Makes sure, now and whenever the server is probed, that it takes images, and reads an image as the same
        tokens as `renderer`.

        Raises:
            EngineError: it does not answer.
            ConfigurationError: it does not; the message says how to start it.
        """
        refused = f"{self._flag} names {self.http.url}, which is shown no images, for it"
        if not isinstance(self._wire, TokensWire):
            raise ConfigurationError(
                f"{refused} lacks the endpoint /inference/v1/generate: start it with vllm serve --enable-scale-out, or "
                "sample with the embedded engine or with vLLM's."
            )
        tokens, images = renderer.sequence(renderer.mark, blank())
        params = SamplingParams(top_k=1, max_new_tokens=1)
        request = GenerationRequest(prompt_token_ids=tokens, images=images, params=params)
        body = self._wire.body("rollgrad-image", request, frozenset())
        body |= image_fields(request, await data_uris(request), renderer.mark_token, f"{self._client}-probe")
        status, answer = await self.http.ask(self._wire.path, body, seconds=PROBE_SECONDS, repeat=True)
        refusal = self.http.refusal(self._wire.path, status, answer)
        if status in REFUSALS:
            raise ConfigurationError(f"{refused} refuses one ({refusal}): serve a model that sees images.")
        if status != 200:
            raise EngineError(refusal)
        self._check_expanded(answer, request)
        self._renderer = renderer

    def _check_expanded(self, answer: Any, request: GenerationRequest) -> None:
        with foreign_code(self._no_answer):
            check_expanded(answer, request, self.http.url)

    async def require_weights(self, directory: Path | None = None) -> None:
        """Makes sure that weights can be brought, through files in `directory` or, without, through shared memory.
        Whatever the server is at is ended.

        Raises:
            EngineError: it does not answer.
            ConfigurationError: they cannot; the message says how to start the server.
        """
        lacking = []
        if not isinstance(self._wire, TokensWire):
            lacking.append("the endpoint /inference/v1/generate (vllm serve --enable-scale-out)")
        if not self.processed:
            lacking.append("log-probs of the distribution it samples from (--logprobs-mode processed_logprobs)")
        status, info = await self.http.ask(SERVER_INFO)
        if status not in (200, *NO_SUCH_PATH):
            raise EngineError(self.http.refusal(SERVER_INFO, status, info))
        if status in NO_SUCH_PATH:
            lacking.append("the endpoints that pause it and bring weights (environment VLLM_SERVER_DEV_MODE=1)")
        elif self._configured(info)[0] != BACKEND:
            lacking.append(
                f"""the way that weights take (--weight-transfer-config '{{"backend": "{BACKEND}"}}', and rollgrad """
                "installed beside vLLM)"
            )
        if lacking:
            raise ConfigurationError(
                f"rollout.server_urls names {self.http.url}, which cannot be trained with, for it lacks "
                f"{' and '.join(lacking)}: start it as docs/cluster.md says, or only evaluate (`rollgrad eval`)."
            )
        if info["vllm_config"].get("speculative_config"):
            raise ConfigurationError(
                f"rollout.server_urls names {self.http.url}, which guesses tokens ahead, and ends when it is asked for "
                "log-probs of given tokens, as after each push: start it without --speculative-config."
            )
        _, self.model, self._follows = self._configured(info)
        if self.model.quantized:
            log.info(
                "the server quantises, and is another policy than the one that trains; --algo.correction.level token "
                "corrects for it",
                server=self.http.url,
                by=" and ".join(self.model.quantized),
            )
        await self.abort(())
        await self.thaw()
        await self._require_files(directory)
        self._controlled = True

    def _configured(self, info: Any) -> tuple[str | None, EngineModel, str]:
        """Returns what SERVER_INFO says of the way of weights, of the model, and of what follows grammars.

        Raises:
            EngineError: it is no answer of vLLM's.
        """
        with foreign_code(self._no_answer):
            config = info["vllm_config"]
            dtype: torch.dtype = getattr(torch, config["model_config"]["dtype"].removeprefix("torch."))
            quantized = quantized_by(config["model_config"]["quantization"], config["cache_config"]["cache_dtype"])
            model = EngineModel(dtype, self.model.vocabulary, quantized)
            way, forms = (config.get(f"{name}_config") or {} for name in ("weight_transfer", "structured_outputs"))
            return way.get("backend"), model, forms.get("backend", GRAMMARS_FOLLOWED_ALIKE[0])

    def _read(self, wire: Wire, answer: Any, version: int) -> Generation:
        with foreign_code(self._no_answer):
            return wire.read(answer, version)

    def _no_answer(self, words: str) -> EngineError:
        return EngineError(f"The server {self.http.url} answers otherwise than vLLM does ({words}).")

    async def _require_files(self, directory: Path | None) -> None:
        place = DIRECTORY if directory is None else str(directory)
        memory = SharedMemory(bucket_bytes=ALIGNMENT, directory=place)
        try:
            await self._announce_memory({"path": memory.path, "bucket_bytes": memory.bucket_bytes})
        except EngineError as error:
            raise ConfigurationError(
                f"rollout.server_urls names {self.http.url}, which cannot be trained with, for it does not see this "
                f"machine's {place} ({error}): " + (UNSEEN_MEMORY if directory is None else UNSEEN_FILES)
            ) from error
        finally:
            memory.unlink()

    async def sample(
        self,
        name: str,
        request: GenerationRequest,
        eos_token_ids: frozenset[int],
        on_token: Callable[[int], None] | None,
    ) -> Generation:
        """Implements `Core.sample`.

        Raises:
            DataError: the server follows the request's grammar otherwise than the trainer would.
        """
        if request.params.grammar is not None and self._follows not in GRAMMARS_FOLLOWED_ALIKE:
            raise DataError(
                f"The server {self.http.url} follows the forms of replies by {self._follows}, whose allowed tokens are "
                "not known to the trainer: start vLLM without --structured-outputs-config, or leave response_format "
                "and tool_choice out."
            )
        aborts = self._aborts
        async with self._slots:
            uris = await data_uris(request)
            if aborts != self._aborts:
                return Generation(token_ids=[], logprobs=[], versions=[], stop_reason=StopReason.ABORTED)
            body = self._wire.body(name, request, eos_token_ids) | self._shared_fields(name, request, uris)
            if on_token is None:
                # No deadline: a frozen reply takes as long as the pause. Who waits looks after the server (`ping`).
                size = places(request.params)
                answer = await self.http.call(self._wire.path, body, seconds=None, repeat=True, places=size)
            else:
                answer = await self._streamed(body, request.params, on_token)
        if request.images:
            self._check_expanded(answer, request)
        generation = self._read(self._wire, answer, self._version)
        count = request.params.top_logprobs
        return evolve(generation, top_logprobs=[each[:count] for each in generation.top_logprobs] if count else ())

    async def _streamed(self, body: Mapping[str, Any], params: SamplingParams, on_token: Callable[[int], None]) -> Any:
        """Returns the answer to a request for one reply, whose tokens it tells as they come; if a connection breaks,
        the reply is sampled again with the same seed."""
        listener, joined = Listener(on_token), JoinedAnswer(params)

        def listen() -> Callable[[Any], None]:
            nonlocal joined
            listener.over()
            joined, tell = JoinedAnswer(params), listener.attempt()
            assert tell is not None

            def hear(part: Any) -> None:
                with foreign_code(self._no_answer):
                    tokens = joined.take(part)
                for token in tokens:
                    tell(token)

            return hear

        await self.http.stream(self._wire.path, {**body, "stream": True}, listen, places=places(params))
        if not listener.accepts(self._read(self._wire, joined.whole, self._version)):
            raise EngineError(f"The server {self.http.url} broke off a reply that was streamed: ask again.")
        return joined.whole

    def _shared_fields(self, name: str, request: GenerationRequest, uris: list[str]) -> dict[str, Any]:
        """Returns the fields that say with which other requests this one shares what the server keeps."""
        part = f"{cache_salt(self._part)}-{self._client}"
        fields: dict[str, Any] = {"cache_salt": part} if self._controlled else {}
        if request.images:
            assert self._renderer is not None, "images are only rendered where `require_images` passed"
            # Of other weights' coming, which another client may bring, nothing is known here.
            features = part if self._controlled else f"{part}-{name}"
            fields |= image_fields(request, uris, self._renderer.mark_token, features)
        return fields

    async def next_logprob(self, name: str, prompt: Sequence[int], token: int, temperature: float) -> float:
        """Implements `Core.next_logprob`."""
        wire = self._tokens_wire()
        body = wire.probe_body(name, prompt, token, temperature)
        answer = await self.http.call(wire.path, body, repeat=True)
        with foreign_code(self._no_answer):
            return wire.read_probe(answer, token)

    async def abort(self, names: Sequence[str]) -> None:
        """Implements `Core.abort`; all requests of the server end, and it takes no more steps."""
        self._aborts += 1
        await self._control("/pause?mode=abort&clear_cache=false")

    async def freeze(self) -> None:
        """Implements `Core.freeze`."""
        await self._control("/pause?mode=keep&clear_cache=false")

    async def thaw(self) -> None:
        """Implements `Core.thaw`."""
        await self._control("/resume")

    async def announce(self, version: int) -> None:
        """Implements `Core.announce`."""
        self._version = version
        if self._controlled:
            await self._control("/update_weight_version", {"new_version": str(version)})

    async def forget(self) -> None:
        """Implements `Core.forget`; the features of images are left to vLLM, which knows them by their part."""
        await self._control("/reset_prefix_cache?reset_running_requests=true")
        self.set_apart()

    def set_apart(self) -> None:
        """Implements `Core.set_apart`."""
        self._part += 1

    async def sleep(self) -> None:
        """Implements `Core.sleep`."""
        await self._control("/sleep?level=1")

    async def wake(self, part: str) -> None:
        """Implements `Core.wake`."""
        await self._control(f"/wake_up?tags={part}")

    async def ping(self) -> None:
        """Implements `Core.ping`."""
        await self.http.call(self._health)

    async def begin_update(self, info: Mapping[str, Any] | None) -> None:
        """Implements `Core.begin_update`."""
        if info is not None:
            await self._announce_memory(info)
        status, _ = await self.http.ask("/start_weight_update", {})
        if status != 200:  # another run left an incomplete transfer
            await self.http.ask("/finish_weight_update", {})
            await self._control("/start_weight_update")

    async def take_update(self, update: Mapping[str, Any]) -> None:
        """Implements `Core.take_update`."""
        await self._control("/update_weights", {"update_info": update})

    async def finish_update(self) -> None:
        """Implements `Core.finish_update`."""
        await self._control("/finish_weight_update", {})

    async def _announce_memory(self, info: Mapping[str, Any]) -> None:
        """Passes the place of the weights to vLLM's backend."""
        await self._control("/init_weight_transfer_engine", {"init_info": info})

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Calls a path of vLLM's development mode."""
        await self.http.call(path, body or {})

    def _tokens_wire(self) -> TokensWire:
        assert isinstance(self._wire, TokensWire), "weights are only brought where `require_weights` passed"
        return self._wire
