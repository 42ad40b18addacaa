"""Engines, which sample token ids and text after a text or token ids."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollgrad.adapters.system.certificates import trusted_certificates
from rollgrad.adapters.system.server_sent_events import ServerSentEvents
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import ConfigurationError, EngineError

if TYPE_CHECKING:
    import httpx2

MAX_TOKENS = 10240
"""Tokens of a reply unless told otherwise."""
TEMPERATURE = 0.6
TIMEOUT = 600.0
"""Seconds that a server may take for one reply, or for the next part of a streamed one."""
TOKEN_BYTES = 1024
"""Bytes of a streamed token, at most: with its text and what else an event says."""
END_OF_STREAM = "[DONE]"
"""Data of the last event of a stream."""


Piece = tuple[list[int], str]
"""Token ids of a reply, or a part of it, and their text."""


class LLMEngine(ABC):
    """Samples replies."""

    @abstractmethod
    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = MAX_TOKENS,
        temperature: float = TEMPERATURE,
        stream: bool = False,
    ) -> Piece | Iterator[Piece]:
        """Returns the token ids, and their text, that follow `prompt`; with `stream` an iterator of parts of them, as
        they are sampled."""

    @abstractmethod
    def tokenize(self, prompt: str) -> list[int]:
        """Returns the token ids of a text, with nothing added."""


class OpenAIEngine(LLMEngine):
    """Samples on a server of `/v1/completions` that returns token ids and has `/tokenize`, like vLLM.

    Args:
        model: its name on the server; None is `OPENAI_MODEL` of the environment.
        base_url: address up to and with `/v1`; None is `OPENAI_BASE_URL`.
        api_key: None is `OPENAI_API_KEY`; none is sent without one.

    Raises:
        ConfigurationError: there is no model or no address.
    """

    def __init__(self, model: str | None = None, base_url: str | None = None, api_key: str | None = None) -> None:
        import httpx2

        from rollgrad.adapters.system.bounded_answer import UNCOMPRESSED

        model, base_url = model or os.environ.get("OPENAI_MODEL"), base_url or os.environ.get("OPENAI_BASE_URL")
        if not model or not base_url:
            raise ConfigurationError(
                f"OpenAIEngine has model={model!r} and base_url={base_url!r}, but needs both: pass them, or set "
                "OPENAI_MODEL and OPENAI_BASE_URL."
            )
        self._model = model
        self._base_url = base_url.rstrip("/")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._client = httpx2.Client(
            verify=trusted_certificates(),
            timeout=TIMEOUT,
            headers={**UNCOMPRESSED, **({"Authorization": f"Bearer {key}"} if key else {})},
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = MAX_TOKENS,
        temperature: float = TEMPERATURE,
        stream: bool = False,
    ) -> Piece | Iterator[Piece]:
        """Returns one reply of the server; with `stream` its parts, as the server sends them: one that tells token ids
        at the end alone sends them with the last part.

        Raises:
            EngineError: the server failed, or returned no token ids; with `stream` while parts are read.
        """
        body = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "return_token_ids": True,
        }
        url = f"{self._base_url}/completions"
        if stream:
            return self._parts(url, {**body, "stream": True})
        piece = _piece(self._post(url, body))
        _require_tokens(url, piece)
        return piece

    def _parts(self, url: str, body: dict[str, Any]) -> Iterator[Piece]:
        """Yields the parts of a streamed reply."""
        from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES, parts_within

        whole: Piece = [], ""
        with (
            foreign_code(lambda words: EngineError(f"{url} cannot be reached: {words}")),
            self._client.stream("POST", url, json=body) as response,
        ):
            if response.status_code != 200:
                raise _refused(url, response.status_code, _text(response))
            events = ServerSentEvents()
            received = parts_within(response, ANSWER_BYTES + TOKEN_BYTES * body["max_tokens"])
            for data in (data for part in received for data in events.feed(part)):
                if data == END_OF_STREAM:
                    _require_tokens(url, whole)
                    return
                event = _object(url, data)
                if "error" in event:
                    raise EngineError(f"{url} broke a reply off: {event['error']}.")
                piece = _piece(event)
                whole = whole[0] + piece[0], whole[1] + piece[1]
                if any(piece):
                    yield piece
        raise EngineError(f"{url} ended a stream before its reply was whole.")

    def tokenize(self, prompt: str) -> list[int]:
        """Returns the token ids of a text, with nothing added.

        Raises:
            EngineError: the server failed.
        """
        url = f"{self._base_url.removesuffix('/v1')}/tokenize"
        answer = self._post(url, {"model": self._model, "prompt": prompt, "add_special_tokens": False})
        if not isinstance(answer.get("tokens"), list):
            raise EngineError(f"{url} returned no list of tokens: the server must be able to tokenize.")
        return [int(token) for token in answer["tokens"]]

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        with (
            foreign_code(lambda words: EngineError(f"{url} cannot be reached: {words}")),
            self._client.stream("POST", url, json=body) as response,
        ):
            text = _text(response)
        if response.status_code != 200:
            raise _refused(url, response.status_code, text)
        return _object(url, text)


def _text(response: "httpx2.Response") -> str:
    """Returns the text of an answer that is not read yet."""
    from rollgrad.adapters.system.bounded_answer import ANSWER_BYTES, parts_within

    return b"".join(parts_within(response, ANSWER_BYTES, TIMEOUT)).decode(errors="replace")


def _refused(url: str, status: int, text: str) -> EngineError:
    return EngineError(f"{url} answered {status} ({text[:200]!r}).")


def _object(url: str, text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{url} answered something that is not JSON ({text[:200]!r}).") from error
    return answer if isinstance(answer, dict) else {}


def _piece(answer: dict[str, Any]) -> Piece:
    choice = (answer.get("choices") or [{}])[0]
    return [int(token) for token in choice.get("token_ids") or ()], str(choice.get("text") or "")


def _require_tokens(url: str, piece: Piece) -> None:
    if not piece[0]:
        raise EngineError(
            f"{url} returned no token ids for return_token_ids, which agents need to continue exactly: use a server "
            "that has them (vLLM from 0.10.2 on)."
        )
