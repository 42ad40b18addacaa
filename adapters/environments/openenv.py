"""OpenEnv servers, over their WebSocket `/ws`.

Protocol: requests are `{"type": "reset" | "step" | "close", "data": {...}}`, answers are
`{"type": "observation" | "error", "data": {...}}`. Each connection is a session, and lasts one episode. Does not own:
the server.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollgrad.adapters.environments.opening import opening, prompt_seed, user_message
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError, MissingExtraError
from rollgrad.domain.ports.environment import Environment, StepResult

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

CLOSE_SECONDS = 5.0
"""Longest wait for the end of the connection."""
MAX_MESSAGE_BYTES = 100 * 2**20
"""Largest observation, as in OpenEnv's own client."""
INVALID = "VALIDATION_ERROR"
"""Error code of the server for an action that does not fit its schema."""


def as_message(reply: str) -> Mapping[str, Any]:
    """Returns the action `{"message": reply}`."""
    return {"message": reply}


def as_json(observation: Mapping[str, Any]) -> str:
    """Returns the fields of an observation as JSON, without its metadata."""
    return json.dumps({key: value for key, value in observation.items() if key != "metadata"}, ensure_ascii=False)


class OpenEnvEnvironment(Environment):
    """Plays one episode on the OpenEnv server at `url`, seeded by the prompt (`prompt_seed`).

    Args:
        url: address of the server (http, https, ws or wss), without `/ws`.
        parse: turns a reply into the action's fields; it raises ValueError if the reply has no action.
        render: turns an observation's fields into text.
        timeout: seconds for the connection, and for each answer.

    Metrics: `invalid_actions`, replies so far without an action that the server accepts. The model is told of them.

    Raises:
        ConfigurationError: `url` has another scheme.
        MissingExtraError: the package websockets is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        parse: Callable[[str], Mapping[str, Any]] = as_message,
        render: Callable[[Mapping[str, Any]], str] = as_json,
        timeout: float = 60.0,
    ) -> None:
        scheme, separator, rest = url.partition("://")
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if not separator or scheme not in schemes:
            raise ConfigurationError(
                f"The OpenEnv server's url is {url!r}, but it starts with http://, https://, ws:// or wss://: correct "
                "the url of OpenEnvEnvironment."
            )
        try:
            import websockets  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                "OpenEnvEnvironment needs the package websockets, which is not installed: pip install rollgrad[openenv]"
            ) from error
        self._url = f"{schemes[scheme]}://{rest.rstrip('/')}/ws"
        self._parse = parse
        self._render = render
        self._timeout = timeout
        self._connection: ClientConnection | None = None
        self._invalid = 0

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Returns the prompt's conversation with the first observation.

        Raises:
            ConnectionError: the server is not there, or hung up.
            RuntimeError: the server answered with an error.
            TimeoutError: the server did not answer in time.
        """
        from websockets.asyncio.client import connect

        await self.close()
        self._invalid = 0
        self._connection = await self._in_time(
            "a connection",
            connect(self._url, open_timeout=None, close_timeout=CLOSE_SECONDS, max_size=MAX_MESSAGE_BYTES),
            lambda words: ConnectionError(f"No connection to the OpenEnv server {self._url}: {words}"),
        )
        answer = await self._ask("reset", {"seed": prompt_seed(prompt)})
        if answer["type"] == "error":
            raise self._refused(answer)
        return opening(prompt, self._render(answer["data"]["observation"]))

    async def step(self, action: Action) -> StepResult:
        """Sends the reply's action; a reply without a valid action is answered by the reason.

        Raises:
            ConnectionError: the server hung up.
            RuntimeError: the server answered with an error that is not the action's.
            TimeoutError: the server did not answer in time.
        """
        try:
            fields = self._parse(action.text)
        except ValueError as error:
            return self._invalid_action(str(error))
        answer = await self._ask("step", fields)
        if answer["type"] == "error":
            if answer["data"].get("code") != INVALID:
                raise self._refused(answer)
            return self._invalid_action(_validation_errors(answer["data"]))
        data = answer["data"]
        return StepResult(
            observation=user_message(self._render(data["observation"])),
            reward=float(data.get("reward") or 0.0),
            terminated=bool(data.get("done")),
            info=data.get("metadata") or {},
            metrics={"invalid_actions": float(self._invalid)},
        )

    async def close(self) -> None:
        """Ends the session, if the server still listens, and closes the connection."""
        from websockets.exceptions import ConnectionClosed

        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.send(json.dumps({"type": "close"}))
        except (ConnectionClosed, TimeoutError):
            pass  # it is gone already
        await connection.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        connection = self._connection
        if connection is None:
            raise ConnectionError(f"There is no connection to the OpenEnv server {self._url}: reset comes first.")

        async def exchange() -> str | bytes:
            await connection.send(json.dumps({"type": kind, "data": data}))
            return await connection.recv()

        said = await self._in_time(
            f"the answer to {kind}",
            exchange(),
            lambda words: ConnectionError(
                f"The OpenEnv server {self._url} hung up before it answered {kind} ({words})."
            ),
        )
        try:
            answer = json.loads(said)
        except (ValueError, RecursionError):  # no JSON, or so deep that nobody reads it
            answer = None
        if not isinstance(answer, dict) or answer.get("type") not in ("observation", "error") or "data" not in answer:
            raise RuntimeError(f"The OpenEnv server {self._url} answered {kind} with {str(answer)[:200]}.")
        return answer

    async def _in_time(self, what: str, waiting: Any, refusal: Callable[[str], Exception]) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                with foreign_code(refusal):
                    return await waiting
        except TimeoutError as error:
            raise TimeoutError(f"Waited {self._timeout:g} s for {what} of the OpenEnv server {self._url}.") from error

    def _refused(self, answer: Mapping[str, Any]) -> RuntimeError:
        data = answer["data"]
        return RuntimeError(f"The OpenEnv server {self._url} failed: {data.get('message')} ({data.get('code')}).")

    def _invalid_action(self, why: str) -> StepResult:
        self._invalid += 1
        text = f"That is no valid action: {why}" if why else "That is no valid action."
        return StepResult(observation=user_message(text), metrics={"invalid_actions": float(self._invalid)})


def _validation_errors(data: Mapping[str, Any]) -> str:
    """Returns Pydantic's validation errors, one for each field; the error's own message if it names no field."""
    found = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in data.get("errors") or ()]
    return "; ".join(found) or str(data.get("message"))
