"""For whoever runs the service: is it alive, what is it, how is it doing, how is it used."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, Response

from service.answers import Json
from service.state import Current

router = APIRouter(tags=["operation"])


@router.get("/health", summary="Whether the process is alive", response_class=Response)
async def health() -> Response:
    """Answers at once, however much the model has to do."""
    return Response()


@router.get("/ready", summary="Whether requests can be answered", response_class=Response)
async def ready(service: Current) -> Response:  # noqa: ARG001 - there is a service only once everything is open
    """The model is loaded and the data directory open."""
    return Response()


@router.get("/info", summary="The model and the limits", response_model=dict[str, Any])
async def info(service: Current) -> Json:
    """As text-embeddings-inference has it, with the fingerprint that collections and classifiers are bound to."""
    spec, settings = service.encoder.spec, service.settings
    answer = {
        "model_id": service.model_id,
        "model_sha": service.encoder.fingerprint,
        "model_dtype": "float32",
        "model_type": {"embedding": {"pooling": spec.pooling}},
        "fingerprint": service.encoder.fingerprint,
        "runtime": "torch",
        "dimensions": service.encoder.hidden_size,
        "max_input_length": spec.max_length,
        "prompts": dict(spec.prompts),
        "max_batch_tokens": settings.max_batch_tokens,
        "max_queue_tokens": settings.max_queue_tokens,
        "max_body_bytes": settings.max_body_bytes,
        "threads": settings.threads,
        "auto_truncate": True,
        "version": version("nearsense"),
    }
    return Json(answer)


@router.get("/metrics", summary="Counters for Prometheus", response_class=Response)
async def metrics(service: Current) -> Response:
    """Prometheus' text format."""
    return Response(service.metrics.write(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The interface to try out; everything it loads comes from this service."""
    return get_swagger_ui_html(
        openapi_url=str(request.app.openapi_url),
        title=request.app.title,
        swagger_js_url="/docs/assets/swagger-ui-bundle.js",
        swagger_css_url="/docs/assets/swagger-ui.css",
        swagger_favicon_url="/docs/assets/favicon.png",
    )
