"""Real servers on the loopback interface that speak the wires of OpenEnv and NeMo Gym, each with a guessing game."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect


@contextmanager
def serve(app: Starlette) -> Iterator[str]:
    """The address of a server that runs `app` in a thread."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 300
    while not server.started:
        assert time.monotonic() < until, "the server does not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10.0)


def openenv_app(heard: list[dict[str, Any]] | None = None, hooks: dict[str, Callable[[], Any]] | None = None) -> Any:
    """Guess the last digit of the seed. `hooks` answer instead of the game; what they raise hangs up."""
    log = heard if heard is not None else []

    async def session(socket: WebSocket) -> None:
        await socket.accept()
        seed = steps = 0
        try:
            while True:
                message = json.loads(await socket.receive_text())
                log.append(message)
                kind, data = message["type"], message.get("data", {})
                if kind == "close":
                    break
                hook = (hooks or {}).get(kind)
                if hook is not None:
                    answer = await hook()
                elif kind == "reset":
                    seed, steps = data.get("seed", 0), 0
                    answer = observation("Guess a digit.", False, None, {})
                elif not isinstance(data.get("message"), str) or set(data) != {"message"}:
                    errors = [{"type": "string_type", "loc": ["message"], "msg": "Input should be a valid string"}]
                    answer = error("VALIDATION_ERROR", "Invalid message", errors=errors)
                else:
                    steps += 1
                    right = data["message"].strip() == str(seed % 10)
                    answer = observation("yes" if right else "no", right, 1.0 if right else -0.1, {"steps": steps})
                await socket.send_text(json.dumps(answer))
        except (WebSocketDisconnect, ConnectionError):
            pass
        finally:
            log.append({"type": "gone"})
            with suppress(RuntimeError):
                await socket.close()

    return Starlette(routes=[WebSocketRoute("/ws", session)])


def observation(text: str, done: bool, reward: float | None, metadata: dict[str, Any]) -> dict[str, Any]:
    fields = {"text": text, "metadata": metadata}
    data = {"observation": fields, "reward": reward, "done": done, **({"metadata": metadata} if metadata else {})}
    return {"type": "observation", "data": data}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


NEMO_GYM_TOOLS = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds to the session's counter.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    }
]


def nemo_gym_app(
    verified: list[dict[str, Any]] | None = None, hooks: dict[str, Callable[[], Any]] | None = None
) -> Any:
    """Add up to the task's `goal`. `hooks` answer a path instead of the game."""
    sessions: dict[str, dict[str, Any]] = {}

    def hooked(path: str, handler: Callable[[Request], Any]) -> Route:
        async def answer(request: Request) -> Response:
            hook = (hooks or {}).get(path)
            return await hook() if hook is not None else await handler(request)

        return Route(path, answer, methods=["POST"])

    async def seed_session(request: Request) -> Response:
        task = await request.json()
        if "input" not in task.get("responses_create_params", {}):
            return JSONResponse({"detail": "responses_create_params.input: field required"}, 422)
        key = secrets.token_hex(8)
        sessions[key] = {"count": 0, "goal": task.get("goal", 0)}
        response = JSONResponse({})
        response.set_cookie("session", key)
        return response

    async def add(request: Request) -> Response:
        by = (await request.json()).get("by")
        if not isinstance(by, int):
            return JSONResponse({"detail": "by: Input should be a valid integer"}, 422)
        state = sessions[request.cookies["session"]]
        state["count"] += by
        return JSONResponse({"count": state["count"]})

    async def verify(request: Request) -> Response:
        body = await request.json()
        if verified is not None:
            verified.append(body)
        state = sessions[request.cookies["session"]]
        right = state["count"] == state["goal"]
        return JSONResponse({**body, "reward": float(right), "distance": abs(state["goal"] - state["count"])})

    return Starlette(
        routes=[hooked("/seed_session", seed_session), hooked("/add", add), hooked("/verify", verify)],
    )
