"""The routes of the Tinker API: `/api/v1/...`, as the `tinker` package asks for them.

A request for work is answered with an id at once; `retrieve_future` waits for its result. Does not own: the socket
(`server.py` of the room above), what a request means (`service.py`).
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

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
    models, shelf = service.models, service.shelf

    def posted(schema: str, work: Callable[[Any], dict[str, Any]]) -> Handler:
        """Returns the handler of a request in JSON of the package's type `schema`."""

        async def handle(request: Request) -> Response:
            parsed = parse(schema, await read_json(request))
            with _refusals():
                return JSONResponse(work(parsed))

        return handle

    def future(request_id: str, model_id: str | None = None) -> dict[str, Any]:
        return {"request_id": request_id, "model_id": model_id}

    def create_session(request: Any) -> dict[str, Any]:
        session_id = service.create_session()
        return {"type": "create_session", "session_id": session_id, "info_message": UNEMBEDDING}

    def heartbeat(request: Any) -> dict[str, Any]:
        service.heartbeat(request.session_id)
        return {"type": "session_heartbeat"}

    def create_sampler(request: Any) -> dict[str, Any]:
        return {"type": "create_sampling_session", "sampling_session_id": service.create_sampler(request)}

    def sample(request: Any) -> dict[str, Any]:
        request_id, sequence_ids = service.sample(request)
        return {**future(request_id), "sample_sequence_ids": sequence_ids}

    def get_info(request: Any) -> dict[str, Any]:
        description = service.description(request.model_id)
        named = {"arch": models.architecture, "model_name": models.name, "tokenizer_id": models.name}
        return {
            "type": "get_info",
            "model_data": named,
            "model_id": request.model_id,
            "is_lora": True,
            "lora_rank": description.lora_rank,
            "model_name": models.name,
        }

    async def forward_backward(request: Request) -> Response:
        body = await request.body()
        with _refusals():
            parsed = read_forward_backward(body)
            return JSONResponse(future(service.forward_backward(parsed), parsed.model_id))

    async def retrieve(request: Request) -> Response:
        request_id = parse("FutureRetrieveRequest", await read_json(request)).request_id
        if request_id not in service.results:
            raise HttpError(404, f"There is no request {request_id!r}: the server has been started again.")
        answer = await service.results.wait(request_id, WAIT_SECONDS)
        if answer is None:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        return Response(answer, media_type=PROTOBUF) if isinstance(answer, bytes) else JSONResponse(dict(answer))

    async def cancel(request: Request) -> Response:
        service.results.cancel(str((await read_json(request)).get("request_id")))
        return Response(status_code=204)

    async def finish(request: Request) -> Response:
        service.finish(request.path_params["session_id"])
        return Response(status_code=204)

    async def weights_info(request: Request) -> Response:
        with _refusals():
            _, saved = shelf.find(str((await read_json(request)).get("tinker_path")), STATE, SAMPLER)
        trained = {"train_unembed": False, "train_mlp": True, "train_attn": True}
        return JSONResponse({"base_model": saved.base_model, "is_lora": True, "lora_rank": saved.lora_rank, **trained})

    async def training_run(request: Request) -> Response:
        run_id = request.path_params["run_id"]
        with _refusals(404):
            found = shelf.run(run_id)
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

    async def delete_checkpoint(request: Request) -> Response:
        with _refusals(404):
            shelf.delete(*(request.path_params[part] for part in ("run_id", "kind", "name")))
        return Response(status_code=204)

    async def sampler(request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        path = service.weights(sampler_id).path
        return JSONResponse({"sampler_id": sampler_id, "base_model": models.name, "model_path": path})

    async def capabilities(request: Request) -> Response:
        model = {"model_name": models.name, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{**model, "max_context_length": models.max_tokens}]})

    async def ignore(request: Request) -> Response:
        return JSONResponse({"status": "accepted"})  # telemetry, of which nothing is kept

    def answered(body: dict[str, Any]) -> Handler:
        async def handle(request: Request) -> Response:
            return JSONResponse(body)

        return handle

    posts: dict[str, Handler] = {
        "client/config": answered(CLIENT_SETTINGS),
        "client/dynamic_config": answered({"sample_cancel_enabled": True}),
        "telemetry": ignore,
        "create_session": posted("CreateSessionRequest", create_session),
        "session_heartbeat": posted("SessionHeartbeatRequest", heartbeat),
        "sessions/{session_id}/finish": finish,
        "create_model": posted("CreateModelRequest", lambda request: future(*service.create_model(request))),
        "load_weights": posted("LoadWeightsRequest", lambda request: future(*service.load_model(request))),
        "get_info": posted("GetInfoRequest", get_info),
        "forward_backward": forward_backward,
        "optim_step": posted("OptimStepRequest", lambda request: future(service.optim_step(request))),
        "save_weights": posted("SaveWeightsRequest", lambda request: future(service.save_state(request))),
        "save_weights_for_sampler": posted(
            "SaveWeightsForSamplerRequest", lambda request: future(service.save_for_sampler(request))
        ),
        "create_sampling_session": posted("CreateSamplingSessionRequest", create_sampler),
        "asample": posted("SampleRequest", sample),
        "retrieve_future": retrieve,
        "cancel_future": cancel,
        "weights_info": weights_info,
    }
    gets: dict[str, Handler] = {
        "healthz": answered({"status": "ok"}),
        "get_server_capabilities": capabilities,
        "samplers/{sampler_id}": sampler,
        "training_runs/{run_id}": training_run,
    }
    return create_app(
        [
            *(Route(f"/api/v1/{path}", handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(f"/api/v1/{path}", handler, methods=["GET"]) for path, handler in gets.items()),
            Route("/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}", delete_checkpoint, methods=["DELETE"]),
            health_route(lambda: {"model": models.name}),
        ]
    )


@contextmanager
def _refusals(status: int = 400) -> Iterator[None]:
    """Turns the error of a checkpoint that is not there into one for the client."""
    try:
        yield
    except CheckpointError as error:
        raise HttpError(status, str(error), code="no_checkpoint") from None
