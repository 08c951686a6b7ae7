"""The application: routes, error shapes, middleware and what they work with, put together."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from encoder import ModelDirectoryError
from service import answers, routes_classifiers, routes_collections, routes_operate, routes_text
from service.auth import Gate, require_rows
from service.errors import InvalidError, ServiceError
from service.metrics import Measured, Metrics
from service.settings import Settings
from service.state import open_service

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"description": "What was wrong; on /v1/… OpenAI's error object.", "type": ["string", "object"]},
        "error_type": {"type": "string"},
    },
}
_FAILURES = {
    400: "The body is not JSON, or (on /v1/…) breaks a rule.",
    401: "A key is needed.",
    403: "The Host is not a loopback name.",
    404: "No such model, collection, document or classifier.",
    409: "It belongs to another model.",
    413: "The body is too large.",
    415: "The body is compressed, or no JSON.",
    422: "A value breaks a rule.",
    429: "Too much is waiting; see Retry-After.",
    500: "The model gave no usable answer.",
    503: "The service cannot work now.",
}


ROUTERS = (routes_text.router, routes_collections.router, routes_classifiers.router, routes_operate.router)


def create_app(settings: Settings) -> FastAPI:
    """Make the application. The model is loaded and the data directory opened when it starts."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                service = await stack.enter_async_context(open_service(settings, metrics))
            except (ModelDirectoryError, ServiceError, ImportError, OSError) as error:
                app.state.failure = str(error)
                raise
            metrics.build.info({"version": app.version, "model": service.model_id})
            app.state.service = service
            yield

    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": meaning, "content": {"application/json": {"schema": _ERROR}}}
        for status, meaning in _FAILURES.items()
    }
    app = FastAPI(
        title="nearsense",
        summary="Sentence embeddings that you own: embed, search, classify.",
        version=version("nearsense"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=responses,
        dependencies=[Depends(_refuse_unknown_query)],
    )
    for router in ROUTERS:
        app.include_router(router)
    answers.install(app)
    app.mount("/docs/assets", StaticFiles(directory=str(files("fastapi_offline") / "static")))
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(Measured, metrics=metrics)
    require_rows(served(app))
    return app


def _refuse_unknown_query(request: Request) -> None:
    route = request.scope["route"]
    known = {parameter.alias for parameter in route.dependant.query_params}
    if unknown := sorted(set(request.query_params) - known):
        raise InvalidError(f"the query may hold {sorted(known) or 'nothing'} here, got {unknown[0][:80]!r}")


def served(app: FastAPI) -> set[tuple[str, str]]:
    """Give the method and path of every route."""
    routed = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    return {(method, route.path) for route in routed for method in route.methods or ()} | {
        ("GET", str(app.openapi_url))
    }


def with_readable_failures(app: FastAPI) -> ASGIApp:
    """Make an app that cannot start say why in a sentence, where the cause is known, instead of a traceback."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def shorten(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and hasattr(app.state, "failure"):
                message = {**message, "message": app.state.failure}
            await send(message)

        await app(scope, receive, shorten if scope["type"] == "lifespan" else send)

    return serve
