"""Errors that only the gRPC surface knows."""

from forkpoint.errors import ForkpointError, NodeDrainingError


class MethodNotImplementedError(ForkpointError):
    """The API names this method; this version does not have it."""

    reason = "METHOD_NOT_IMPLEMENTED"

    def __init__(self, method: str) -> None:
        super().__init__(f"{method} is not implemented by this version")
        self.method = method


class StreamAgeError(NodeDrainingError):
    """The stream was answered for as long as streams are: for its client the same as a node that drains."""

    def __init__(self, node: str, resume_position: int | None) -> None:
        super().__init__(node, resume_position)
        self.args = ("the stream ran for long enough: open it again at its position",)
