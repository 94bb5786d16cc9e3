"""Tinker's REST paths: what the public SDK calls, and nothing else of Tinker's cloud. Knows HTTP, and no model."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cairn.align.tinker.frontend import Frontend
from cairn.core.errors import CairnError

PREFIX = "/api/v1"


def application(frontend: Frontend) -> Starlette:
    front = frontend
    posts: dict[str, Callable[[bytes], Awaitable[Any]]] = {
        "client/config": front.config,
        "client/dynamic_config": front.nothing,
        "telemetry": front.telemetry,
        "create_session": front.create_session,
        "session_heartbeat": front.heartbeat,
        "create_model": front.create_model,
        "get_info": front.get_info,
        "forward_backward": front.forward_backward,
        "optim_step": front.optim_step,
        "save_weights": front.save_weights,
        "save_weights_for_sampler": front.save_for_sampler,
        "load_weights": front.load_weights,
        "weights_info": front.weights_info,
        "create_sampling_session": front.create_sampling_session,
        "asample": front.sample,
        "retrieve_future": front.retrieve,
    }
    gets = {"healthz": front.nothing, "get_server_capabilities": front.capabilities}
    routes = [_route(front, f"{PREFIX}/{path}", handle, "POST") for path, handle in posts.items()]
    routes += [_route(front, f"{PREFIX}/{path}", handle, "GET") for path, handle in gets.items()]
    routes.append(_route(front, f"{PREFIX}/samplers/{{id}}", front.sampler, "GET"))
    return Starlette(routes=routes)


def _route(front: Frontend, path: str, handle: Callable[..., Awaitable[Any]], method: str) -> Route:
    async def endpoint(request: HTTPRequest) -> Response:
        if front.api_key is not None and request.headers.get("x-api-key") != front.api_key:
            return JSONResponse({"detail": "the API key is wrong"}, 401)
        try:
            answer = await handle(await request.body(), **request.path_params)
        except CairnError as problem:
            return JSONResponse({"detail": str(problem)}, 422)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return Route(path, endpoint, methods=[method])
