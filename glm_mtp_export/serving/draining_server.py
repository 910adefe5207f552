"""uvicorn that ends what runs while its clients still listen.

uvicorn tells an application to stop only after it has waited for all responses, and cancels those that take too long: a
client would see a broken stream, or a 500 without OpenAI's body. Here the front is closed as soon as the signal comes.
Requests may run on for `drain_seconds`, or until a second Ctrl-C; then each gets the error that the server stops, and
uvicorn has nothing to cancel.
"""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn

from glm_mtp_export.serving.front import Front

__all__ = ["DrainingServer"]

_SECONDS_TO_ANSWER = 5  # from the end of draining until connections are cut
_POLL_SECONDS = 0.02
_FORCED_POLLS = 100


class DrainingServer(uvicorn.Server):
    """`config` gets its time limit of a graceful stop from `drain_seconds`."""

    def __init__(self, config: uvicorn.Config, front: Front, drain_seconds: float) -> None:
        config.timeout_graceful_shutdown = int(drain_seconds) + _SECONDS_TO_ANSWER
        super().__init__(config)
        self._front = front
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, end what runs."""
        self._close_front(self._drain_seconds)
        await super().shutdown(sockets)
        if self.force_exit:
            self._close_front(0.0)
            for _ in range(_FORCED_POLLS):
                if not self.server_state.tasks:
                    break
                await asyncio.sleep(_POLL_SECONDS)

    def _close_front(self, drain_seconds: float) -> None:
        # In a daemon's thread: nobody waits for the first one once a second signal has come.
        threading.Thread(target=self._front.close, args=(drain_seconds,), name="http-stop", daemon=True).start()
