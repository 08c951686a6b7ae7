"""Who may do what, and which requests are not read at all."""

import enum
import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.answers import error_answer
from service.settings import Settings


class Access(enum.Enum):
    """What a route needs of its caller."""

    PUBLIC = "public"
    """Nothing."""
    READ = "read"
    """To turn texts into answers and look things up."""
    WRITE = "write"
    """To change what is stored."""


# Every route has a row, or the service does not start.
ACCESS: dict[tuple[str, str], Access] = {
    ("GET", "/health"): Access.PUBLIC,
    ("GET", "/ready"): Access.PUBLIC,
    ("GET", "/docs"): Access.PUBLIC,
    ("GET", "/openapi.json"): Access.PUBLIC,
    ("GET", "/info"): Access.READ,
    ("GET", "/metrics"): Access.READ,
    ("POST", "/embed"): Access.READ,
    ("POST", "/embed_all"): Access.READ,
    ("POST", "/tokenize"): Access.READ,
    ("POST", "/decode"): Access.READ,
    ("POST", "/similarity"): Access.READ,
    ("POST", "/v1/embeddings"): Access.READ,
    ("GET", "/v1/models"): Access.READ,
    ("GET", "/collections"): Access.READ,
    ("GET", "/collections/{collection}"): Access.READ,
    ("PUT", "/collections/{collection}"): Access.WRITE,
    ("DELETE", "/collections/{collection}"): Access.WRITE,
    ("GET", "/collections/{collection}/documents"): Access.READ,
    ("POST", "/collections/{collection}/documents"): Access.WRITE,
    ("POST", "/collections/{collection}/documents/delete"): Access.WRITE,
    ("GET", "/collections/{collection}/documents/{id:path}"): Access.READ,
    ("DELETE", "/collections/{collection}/documents/{id:path}"): Access.WRITE,
    ("POST", "/search"): Access.READ,
    ("GET", "/classifiers"): Access.READ,
    ("GET", "/classifiers/{classifier}"): Access.READ,
    ("PUT", "/classifiers/{classifier}"): Access.WRITE,
    ("DELETE", "/classifiers/{classifier}"): Access.WRITE,
    ("POST", "/classify"): Access.READ,
}
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d*)?", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PATTERNS = [(method, compile_path(path)[0], path, access) for (method, path), access in ACCESS.items()]
_PUBLIC_FILES = "/docs/"


def route_of(method: str, path: str) -> tuple[str, Access] | None:
    """Give the template of a request's route and what it needs; None where there is no such route."""
    for row_method, pattern, template, access in _PATTERNS:
        if row_method == method and pattern.match(path):
            return template, access
    return None


class Gate:
    """ASGI middleware in front of everything: host name, key, type and size of the body, in this order.

    A request that is refused here is not read. Bodies of unknown length are counted as they come.

    Args:
        app: What stands behind.
        settings: The key, and the limit of a body.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._limit = settings.max_body_bytes
        # Digests, so that neither the length of the key nor how much of it fits shows in the time taken.
        key = settings.api_key
        self._key = None if key is None else hashlib.sha256(key.get_secret_value().encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            status, message = refusal
            headers = {"www-authenticate": "Bearer"} if status == 401 else None
            await error_answer(scope["path"], status, message, headers=headers)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        if _CONTROL.search(scope["path"]):
            return 400, f"the path must not hold control characters, got {scope['path'][:200]!r}"
        if self._key is None and not all(map(_LOOPBACK.fullmatch, headers.getlist("host") or [""])):
            return 403, "the Host must be a loopback name as long as no API key is set, against DNS rebinding"
        route = route_of(scope["method"], scope["path"])
        public = route is not None and route[1] is Access.PUBLIC
        public = public or (scope["method"] in ("GET", "HEAD") and scope["path"].startswith(_PUBLIC_FILES))
        if self._key is not None and not public and not self._has_key(headers.get("authorization", "")):
            return 401, "an API key is needed: send it as 'Authorization: Bearer …'"
        return self._refusal_of_body(headers)

    def _refusal_of_body(self, headers: Headers) -> tuple[int, str] | None:
        if headers.get("content-encoding", "identity").lower() != "identity":
            return 415, f"the body must not be compressed, got content-encoding {headers['content-encoding']}"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            return 413, self._too_large(f"{int(length):,}")
        has_body = length != "0" or "transfer-encoding" in headers
        if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            found = headers.get("content-type", "none")
            return 415, f"the body must be JSON: send 'content-type: application/json', got {found}"
        return None

    def _has_key(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        return scheme.lower() == "bearer" and self._key is not None and hmac.compare_digest(digest, self._key)

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, self._too_large("more"))
            return message

        return counting

    def _too_large(self, found: str) -> str:
        return (
            f"the body must be at most {self._limit:,} bytes, got {found}; send several requests, "
            "or raise NEARSENSE_MAX_BODY_BYTES"
        )


def require_rows(routes: Iterable[tuple[str, str]]) -> None:
    """Refuse to serve a route that nobody decided about.

    Raises:
        RuntimeError: A route is missing from `ACCESS`, or a row has no route.
    """
    different = ACCESS.keys() ^ set(routes)
    if different:
        raise RuntimeError(f"routes and the access table differ in {sorted(different)}. This is a bug.")
