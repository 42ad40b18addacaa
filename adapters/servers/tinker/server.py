"""The routes of the Tinker API: `/api/v1/...`, as the `tinker` package asks for them.

A request for work is answered with an id at once; `retrieve_future` waits for its result. Does not own: the socket
(`server.py` of the room above), what a request means (`service.py`).
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from attrs import frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollgrad.adapters.servers.guard import HttpError, read_json
from rollgrad.adapters.servers.server import create_app, health_route
from rollgrad.adapters.servers.tinker.service import UNEMBEDDING, TinkerService
from rollgrad.adapters.servers.tinker.shelf import SAMPLER, STATE
from rollgrad.adapters.servers.tinker.wire import PROTOBUF, parse, read_forward_backward
from rollgrad.domain.errors import CheckpointError

WAIT_SECONDS = 20.0
"""Longest wait of `retrieve_future`: clients give up after 45 s, and ask again after an answer of 408."""

CLIENT_SETTINGS = {
    "parallel_fwdbwd_chunks": False,  # so that a run's requests come in order
    "use_pyqwest_transport": False,
    "sample_enable_stuck_detection": False,  # a processor may take long
}
"""Settings of the `tinker` package while it talks to this server."""

Handler = Callable[[Request], Awaitable[Response]]


def create_tinker_app(service: TinkerService) -> Starlette:
    """Returns the server's app."""
    answers = _Answers(service)
    posts: dict[str, Handler] = {
        "client/config": _always(CLIENT_SETTINGS),
        "client/dynamic_config": _always({"sample_cancel_enabled": True}),
        "telemetry": _always({"status": "accepted"}),  # accepted, and not kept
        "create_session": _posted("CreateSessionRequest", answers.create_session),
        "session_heartbeat": _posted("SessionHeartbeatRequest", answers.heartbeat),
        "sessions/{session_id}/finish": answers.finish,
        "create_model": _posted("CreateModelRequest", lambda request: _future(*service.create_model(request))),
        "load_weights": _posted("LoadWeightsRequest", lambda request: _future(*service.load_model(request))),
        "get_info": _posted("GetInfoRequest", answers.get_info),
        "forward_backward": answers.forward_backward,
        "optim_step": _posted("OptimStepRequest", lambda request: _future(service.optim_step(request))),
        "save_weights": _posted("SaveWeightsRequest", lambda request: _future(service.save_state(request))),
        "save_weights_for_sampler": _posted(
            "SaveWeightsForSamplerRequest", lambda request: _future(service.save_for_sampler(request))
        ),
        "create_sampling_session": _posted("CreateSamplingSessionRequest", answers.create_sampler),
        "asample": _posted("SampleRequest", answers.sample),
        "retrieve_future": answers.retrieve,
        "cancel_future": answers.cancel,
        "weights_info": answers.weights_info,
    }
    gets: dict[str, Handler] = {
        "healthz": _always({"status": "ok"}),
        "get_server_capabilities": answers.capabilities,
        "samplers/{sampler_id}": answers.sampler,
        "training_runs/{run_id}": answers.training_run,
    }
    checkpoint = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
    return create_app(
        [
            *(Route(f"/api/v1/{path}", handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(f"/api/v1/{path}", handler, methods=["GET"]) for path, handler in gets.items()),
            Route(checkpoint, answers.delete_checkpoint, methods=["DELETE"]),
            health_route(lambda: {"model": service.models.name}),
        ]
    )


def _posted(schema: str, work: Callable[[Any], dict[str, Any]]) -> Handler:
    """Returns the handler of a request in JSON of the package's type `schema`."""

    async def handle(request: Request) -> Response:
        parsed = parse(schema, await read_json(request))
        with _refusals():
            return JSONResponse(work(parsed))

    return handle


def _always(body: dict[str, Any]) -> Handler:
    """Returns a handler that gives the same answer to every request."""

    async def handle(request: Request) -> Response:
        return JSONResponse(body)

    return handle


def _future(request_id: str, model_id: str | None = None) -> dict[str, Any]:
    return {"request_id": request_id, "model_id": model_id}


@frozen(eq=False)
class _Answers:
    """The answers that need the service: to what `parse` made of a request in JSON, or to the request itself."""

    service: TinkerService

    def create_session(self, request: Any) -> dict[str, Any]:
        session_id = self.service.create_session()
        return {"type": "create_session", "session_id": session_id, "info_message": UNEMBEDDING}

    def heartbeat(self, request: Any) -> dict[str, Any]:
        self.service.heartbeat(request.session_id)
        return {"type": "session_heartbeat"}

    def create_sampler(self, request: Any) -> dict[str, Any]:
        return {"type": "create_sampling_session", "sampling_session_id": self.service.create_sampler(request)}

    def sample(self, request: Any) -> dict[str, Any]:
        request_id, sequence_ids = self.service.sample(request)
        return {**_future(request_id), "sample_sequence_ids": sequence_ids}

    def get_info(self, request: Any) -> dict[str, Any]:
        models = self.service.models
        description = self.service.description(request.model_id)
        named = {"arch": models.architecture, "model_name": models.name, "tokenizer_id": models.name}
        return {
            "type": "get_info",
            "model_data": named,
            "model_id": request.model_id,
            "is_lora": True,
            "lora_rank": description.lora_rank,
            "model_name": models.name,
        }

    async def forward_backward(self, request: Request) -> Response:
        body = await request.body()
        with _refusals():
            parsed = read_forward_backward(body)
            return JSONResponse(_future(self.service.forward_backward(parsed), parsed.model_id))

    async def retrieve(self, request: Request) -> Response:
        request_id = parse("FutureRetrieveRequest", await read_json(request)).request_id
        if request_id not in self.service.results:
            raise HttpError(404, f"There is no request {request_id!r}: the server has been started again.")
        answer = await self.service.results.wait(request_id, WAIT_SECONDS)
        if answer is None:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        return Response(answer, media_type=PROTOBUF) if isinstance(answer, bytes) else JSONResponse(dict(answer))

    async def cancel(self, request: Request) -> Response:
        self.service.results.cancel(str((await read_json(request)).get("request_id")))
        return Response(status_code=204)

    async def finish(self, request: Request) -> Response:
        self.service.finish(request.path_params["session_id"])
        return Response(status_code=204)

    async def weights_info(self, request: Request) -> Response:
        with _refusals():
            _, saved = self.service.shelf.find(str((await read_json(request)).get("tinker_path")), STATE, SAMPLER)
        trained = {"train_unembed": False, "train_mlp": True, "train_attn": True}
        return JSONResponse({"base_model": saved.base_model, "is_lora": True, "lora_rank": saved.lora_rank, **trained})

    async def training_run(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        with _refusals(404):
            found = self.service.shelf.run(run_id)
        return JSONResponse(
            {
                "training_run_id": run_id,
                "base_model": found.base_model,
                "model_owner": "rollgrad",
                "is_lora": True,
                "lora_rank": found.lora_rank,
                "last_request_time": datetime.now(UTC).isoformat(),
                "user_metadata": found.user_metadata,
            }
        )

    async def delete_checkpoint(self, request: Request) -> Response:
        with _refusals(404):
            self.service.shelf.delete(*(request.path_params[part] for part in ("run_id", "kind", "name")))
        return Response(status_code=204)

    async def sampler(self, request: Request) -> Response:
        models = self.service.models
        sampler_id = request.path_params["sampler_id"]
        path = self.service.weights(sampler_id).path
        return JSONResponse({"sampler_id": sampler_id, "base_model": models.name, "model_path": path})

    async def capabilities(self, request: Request) -> Response:
        models = self.service.models
        model = {"model_name": models.name, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{**model, "max_context_length": models.max_tokens}]})


@contextmanager
def _refusals(status: int = 400) -> Iterator[None]:
    """Turns the error of a checkpoint that is not there into one for the client."""
    try:
        yield
    except CheckpointError as error:
        raise HttpError(status, str(error), code="no_checkpoint") from None
