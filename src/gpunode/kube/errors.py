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
    def raced(self) -> bool:
        """The object changed, went away or came since it was read: read again and decide again.

        A stale resourceVersion or a name that is taken is a 409; a failed JSON Patch test is a 422 without a reason
        (one that the object's validation refuses has the reason Invalid).
        """
        return self.status in (404, 409) or (self.status == 422 and self.reason != "Invalid")

    @property
    def gone(self) -> bool:
        """The resourceVersion of a watch or continue token is too old: list again."""
        return self.status == 410 or self.reason in ("Expired", "Gone")


class ConfigError(Exception):
    """No usable cluster configuration; the text says what to do."""


class UnreachableError(Exception):
    """The API server could not be reached at all (connection, TLS or timeout)."""
