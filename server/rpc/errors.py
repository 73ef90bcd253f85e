"""The one error that only the gRPC surface knows."""

from forkpoint.errors import ForkpointError


class MethodNotImplementedError(ForkpointError):
    """The API names this method; this version does not have it."""

    reason = "METHOD_NOT_IMPLEMENTED"

    def __init__(self, method: str) -> None:
        super().__init__(f"{method} is not implemented by this version")
        self.method = method
