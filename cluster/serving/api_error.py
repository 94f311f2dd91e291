"""What a request is refused with: a status, a reason, and the form that OpenAI's API gives both."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request. 429 and 503 ask the client to try again, after `retry_after_s`."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """`param`: the key of the body at fault; `code`: a word for programs."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refuse(message: str, param: str | None = None) -> ApiError:
    """A body that cannot be taken."""
    return ApiError(400, message, param=param)
