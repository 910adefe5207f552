"""uvicorn that ends what runs while its clients still listen.

uvicorn tells an application to stop only after it has waited for all responses, and cancels those that take too long: a
client would see a broken stream, or a 500 without OpenAI's body. Here the front is closed as soon as the signal comes.
Requests may run on for `drain_seconds`, then each gets the error that the server stops, and uvicorn has nothing to cancel.
"""

from __future__ import annotations

import socket
import threading

import uvicorn

from glm_mtp_export.serving.front import Front

__all__ = ["DrainingServer"]

_SECONDS_TO_ANSWER = 5  # from the end of draining until connections are cut


class DrainingServer(uvicorn.Server):
    """`config` gets its time limit of a graceful stop from `drain_seconds`."""

    def __init__(self, config: uvicorn.Config, front: Front, drain_seconds: float) -> None:
        config.timeout_graceful_shutdown = int(drain_seconds) + _SECONDS_TO_ANSWER
        super().__init__(config)
        self._front = front
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, end what runs. A second signal does not wait, so neither may the thread be waited for."""
        closing = threading.Thread(target=self._front.close, args=(self._drain_seconds,), name="http-stop", daemon=True)
        closing.start()
        await super().shutdown(sockets)
