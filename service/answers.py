"""Answers: JSON bodies, and errors in the shape that each kind of client expects."""

import http
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from service import errors

logger = logging.getLogger(__name__)

_KINDS = {error.status: error.error_type for error in errors.ServiceError.__subclasses__()} | {500: "Backend"}
# OpenAI's names of what went wrong; anything else below 500 is the request's fault.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


# What pydantic puts among the steps of a place for a branch of a union, or a validator.
_BRANCH = re.compile(r"str|(?:list|function-\w+)\[.*")


class Json(Response):
    """A body written by orjson, which takes NumPy arrays and gives each float32 its shortest exact form.

    NaN would become null, so nothing that may hold one is given to it. Integers of more than 64 bits, which stored
    metadata may hold, are beyond orjson, and Python's own json writes those.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the body."""
        try:
            return orjson.dumps(content, default=_contiguous, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:
            return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _contiguous(value: Any) -> Any:
    # orjson writes arrays that lie in one piece only, which the first columns of several rows do not.
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def error_answer(path: str, status: int, message: str, *, headers: dict[str, str] | None = None) -> JSONResponse:
    """Say what is wrong: as OpenAI does on /v1/…, else as text-embeddings-inference does."""
    body: dict[str, Any]
    if path.startswith("/v1/"):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    else:
        kind = _KINDS.get(status) or http.HTTPStatus(status).phrase.replace(" ", "")
        body = {"error": message, "error_type": kind}
    return JSONResponse(body, status, headers=headers)


def install(app: FastAPI) -> None:
    """Make every failure of an app answer in the right shape."""
    app.add_exception_handler(errors.ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


async def _service_error(request: Request, error: Exception) -> Response:
    status = getattr(error, "status", 500)
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, errors.OverloadedError) else None
    if request.url.path.startswith("/v1/") and isinstance(error, errors.InvalidError):
        status = 400
    if status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    return error_answer(request.url.path, status, str(error), headers=headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    found = error.errors() if isinstance(error, RequestValidationError) else []
    if found[0]["type"] == "json_invalid":
        return error_answer(request.url.path, 400, f"the body must be JSON: {found[0]['ctx']['error']}")
    status = 400 if request.url.path.startswith("/v1/") else 422
    return error_answer(request.url.path, status, _explain(found))


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = getattr(error, "detail", "")
    if status == 404:
        message = f"there is no {request.url.path}; see /docs"
    elif status == 405:
        message = f"{request.method} is not served at {request.url.path}; see /docs"
    elif status == 400:
        # FastAPI's own says nothing; its cause tells that a number is too long, or the nesting too deep.
        message = f"the body must be JSON in UTF-8: {error.__cause__ or message}"
    return error_answer(request.url.path, status, message, headers=dict(getattr(error, "headers", None) or {}))


async def _bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_answer(request.url.path, 500, "the service failed; its log says how. This is a bug.")


def _explain(found: Sequence[Any]) -> str:
    """Name each faulty place and the rule it breaks; of a union's branches, those that came furthest."""
    deepest = max(len(each["loc"]) for each in found)
    places = []
    for each in found:
        if len(each["loc"]) == deepest:
            steps = [step for step in each["loc"][1:] if not _BRANCH.fullmatch(str(step))]
            where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
            places.append(f"{where or 'the body'}: {each['msg'].removeprefix('Value error, ')}")
    return "; ".join(dict.fromkeys(places[:5]))
