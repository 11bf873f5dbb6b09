"""Errors of the Kubernetes API as one exception type that says what was asked and what was answered."""


class ApiError(Exception):
    """The API server refused a request.

    status: HTTP status. reason: the machine-readable reason of the Status object ("Conflict", "NotFound", ...).
    """

    def __init__(self, method: str, path: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{method} {path}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.path = path

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def forbidden(self) -> bool:
        """The user is not known or lacks the right."""
        return self.status in (401, 403)

    @property
    def conflict(self) -> bool:
        """A stale resourceVersion, a failed JSON-Patch test, or a name that is taken."""
        return self.status == 409 or (self.status == 422 and "testing value" in self.message)

    @property
    def gone(self) -> bool:
        """The resourceVersion of a watch or continue token is too old: list again."""
        return self.status == 410 or self.reason in ("Expired", "Gone")


class ConfigError(Exception):
    """No usable cluster configuration; the text says what to do."""


class UnreachableError(Exception):
    """The API server could not be reached at all (connection, TLS or timeout)."""
