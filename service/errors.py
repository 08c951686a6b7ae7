"""What can go wrong in the service, each with the status that a client sees.

ServiceError
├── MalformedError         400  Malformed         the body cannot be read at all
├── UnauthorizedError      401  Unauthorized      no key, or an unknown one
├── ForbiddenError         403  Forbidden         the key does not allow this
├── NotFoundError          404  NotFound          no such collection, document, classifier, ...
├── ConflictError          409  Conflict          contradicts what is stored, or what another process holds
├── TooLargeError          413  TooLarge          the body is over the limit
├── UnsupportedMediaError  415  UnsupportedMedia  the body is compressed, or not JSON
├── InvalidError           422  Validation        readable, but a value breaks a rule
├── OverloadedError        429  Overloaded        too much is waiting already
├── ModelError             500  Backend           the model gave no usable answer
└── NotReadyError          503  Unhealthy         the service cannot work now

The message is for the client: what was wrong, the rule, the value, the remedy. It holds no text of other clients.
"""


class ServiceError(Exception):
    """Any failure with an answer of its own. Raise one of the classes below, never this."""

    status: int = 500
    error_type: str = "Backend"


class MalformedError(ServiceError):
    """The request cannot be read: not JSON, not UTF-8, no such shape. Sending it again will not help."""

    status = 400
    error_type = "Malformed"


class UnauthorizedError(ServiceError):
    """The request brings no key where one is needed, or one that nobody issued."""

    status = 401
    error_type = "Unauthorized"


class ForbiddenError(ServiceError):
    """The key is known, and does not allow what was asked; or the host name is not one of ours."""

    status = 403
    error_type = "Forbidden"


class NotFoundError(ServiceError):
    """What the request names does not exist, or no longer."""

    status = 404
    error_type = "NotFound"


class ConflictError(ServiceError):
    """The request is fine and contradicts what is there: another model's vectors, a taken name, a directory in use."""

    status = 409
    error_type = "Conflict"


class TooLargeError(ServiceError):
    """The body is larger than the limit. It was not read to its end."""

    status = 413
    error_type = "TooLarge"


class UnsupportedMediaError(ServiceError):
    """The body is compressed or of a type that is not served."""

    status = 415
    error_type = "UnsupportedMedia"


class InvalidError(ServiceError):
    """The request can be read and one of its values breaks a rule. The message names the item by its index."""

    status = 422
    error_type = "Validation"


class OverloadedError(ServiceError):
    """More is waiting than can be done soon. Nothing was done; the same request may succeed later.

    Args:
        message: For the client.
        retry_after_s: When to try again, for the `Retry-After` header.
    """

    status = 429
    error_type = "Overloaded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientGoneError(ServiceError):
    """The client closed the connection; nobody reads this answer."""

    status = 499
    error_type = "Cancelled"


class ModelError(ServiceError):
    """The model gave no usable answer, such as a vector that is not finite. The fault is ours, not the client's."""

    status = 500
    error_type = "Backend"


class NotReadyError(ServiceError):
    """The service cannot work now: still loading, shutting down, disk full, data damaged. Nothing was stored."""

    status = 503
    error_type = "Unhealthy"
