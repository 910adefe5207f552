"""The engine's thread: requests come in from any thread, deltas go out to whoever waits.

In: `submit` from any thread. Out: a `RequestHandle` to iterate, to wait on, or with a callback. The engine itself is
touched by the loop's thread only; requests and aborts reach it through an inbox that is emptied between two steps, so
an abort takes effect within one step. What may go wrong: a refused request raises `RequestError` in `submit`; when the
session fails, every waiting request gets that error and later ones are refused with it. Whatever would wait for ever, on
the engine's thread or for deltas that went elsewhere, raises `RuntimeError`.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from glm_mtp_export.errors import EngineError, GlmMtpError, RequestError
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.request import Completion, Delta, GenerationResult, Request

__all__ = ["DeltaStream", "EngineLoop", "RequestHandle"]

_log = logging.getLogger(__name__)


class RequestHandle:
    """One submitted request, on the caller's side."""

    def __init__(self, request: Request, loop: EngineLoop, on_delta: Callable[[Delta], None] | None) -> None:
        self.request = request
        self._loop = loop
        self._on_delta = on_delta
        self._deltas: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._completions: dict[int, Completion] = {}
        self._has_reader = False
        self._grammar: Any = None
        self._accepted = threading.Event()
        self._is_admitted = False
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def __iter__(self) -> DeltaStream:
        """Deltas as they come, until every sequence has ended, once. Leaving early aborts the request."""
        if self._has_reader or self._on_delta is not None:
            where = "on_delta" if self._on_delta is not None else "the iterator made before"
            raise RuntimeError(
                f"the deltas of request {self.request.request_id!r} go to {where}; result() has the answer"
            )
        self._has_reader = True
        return DeltaStream(self)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for all sequences. TimeoutError after `timeout` seconds."""
        if not self._finished.is_set():
            self._loop.check_may_wait("result")
        if not self._finished.wait(timeout):
            raise TimeoutError(f"request {self.request.request_id!r} did not finish in {timeout} s")
        if self._error is not None:
            raise self._error
        completions = tuple(self._completions[i] for i in sorted(self._completions))
        return GenerationResult(self.request.request_id, self.request.prompt_token_ids, completions)

    def abort(self) -> None:
        """End the request; its last deltas say `abort`. Harmless when it has ended already."""
        self._loop.abort(self.request.request_id)

    # ---- called by the loop's thread

    def _deliver(self, delta: Delta) -> bool:
        if delta.completion is not None:
            self._completions[delta.index] = delta.completion
        done = len(self._completions) == self.request.params.n
        if self._on_delta is not None:
            try:
                self._on_delta(delta)
            except BaseException:  # not even a CancelledError of a caller's may stop everyone else's requests
                _log.exception("on_delta of request %r failed; aborting it", self.request.request_id)
                self.abort()
        else:
            self._deltas.put(delta)
        if done:
            self._finished.set()
        return done

    def _fail(self, error: BaseException) -> None:
        self._error = error
        if self._on_delta is not None and self._accepted.is_set():
            for index in set(range(self.request.params.n)) - set(self._completions):
                lost = Completion(index, (), "", "error", error=str(error))
                self._deliver(Delta(self.request.request_id, index, completion=lost))
        self._deltas.put(error)
        self._accepted.set()
        self._finished.set()


class DeltaStream(Iterator[Delta]):
    """The deltas of one request. Closed, left or dropped before its end, even before its first delta, it aborts the request.

    Not a generator: one that was never started would end without a word to the engine.
    """

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._remaining = handle.request.params.n

    def __next__(self) -> Delta:
        if not self._remaining:
            raise StopIteration
        if self._handle._deltas.empty():
            self._handle._loop.check_may_wait("reading a stream")
        item = self._handle._deltas.get()
        if isinstance(item, BaseException):
            self._remaining = 0
            raise item
        self._remaining -= item.finished
        return item

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if self._remaining:
            self._remaining = 0
            self._handle.abort()

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class EngineLoop:
    """Owns an engine and the thread that steps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()
        self._inbox: deque[RequestHandle | str] = deque()
        self._handles: dict[str, RequestHandle] = {}
        self._draining = False
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="glm-mtp-engine", daemon=True)
        self._thread.start()
        # A thread that is in native code while the interpreter ends around it takes the process down with it.
        atexit.register(self.close)

    def check_may_wait(self, what: str) -> None:
        """RuntimeError on the engine's thread, where waiting for the engine would never end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"{what} from an on_delta callback would wait for its own thread; hand the work to another one"
            )

    def submit(self, request: Request, on_delta: Callable[[Delta], None] | None = None) -> RequestHandle:
        """Queue a request; returns once the engine has taken or refused it. `on_delta` runs in the engine's thread."""
        self.check_may_wait("submit")
        self._refuse_when_over()
        handle = RequestHandle(request, self, on_delta)
        # Here, where it keeps nobody else waiting: some grammars take many seconds.
        handle._grammar = self.engine.grammar(request.params)
        with self._wake:
            self._refuse_when_over()
            self._inbox.append(handle)
            self._wake.notify()
        handle._accepted.wait()
        # What fails after a request was taken in belongs to its result, however soon it comes.
        if not handle._is_admitted and handle._error is not None:
            raise handle._error
        return handle

    def _refuse_when_over(self) -> None:
        if self._closing:
            raise EngineError("The runtime is closed and takes no requests. Load it again.")
        if self._failure is not None:
            raise EngineError(f"The engine has stopped after an error ({self._failure}). Restart it.")
        if self._draining:
            raise EngineError("The engine is draining and takes no new requests. Send it to another replica.")

    def abort(self, request_id: str) -> None:
        """End a request within one step."""
        # The inbox would take a handle for a request, and anything else would stop the engine.
        if not isinstance(request_id, str):
            raise RequestError(
                f"request_id is {type(request_id).__name__}, expected text. A handle has its own abort()."
            )
        with self._wake:
            if self._failure is None:  # else all have ended, and nobody would empty the inbox
                self._inbox.append(request_id)
                self._wake.notify()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; False when `timeout` seconds were not enough."""
        self.check_may_wait("drain")
        with self._wake:
            self._draining = True
            return self._wake.wait_for(lambda: not self._handles and not self._inbox, timeout)

    def close(self) -> None:
        """Abort what still runs and end the thread."""
        atexit.unregister(self.close)
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_healthy(self) -> bool:
        """True while the thread takes requests."""
        return self._failure is None and not self._closing and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_inbox():
                for delta in self.engine.step():
                    self._dispatch(delta)
        except GlmMtpError as error:  # says itself what is wrong and what to do
            _log.error("the engine stopped: %s", error)
            self._fail_all(error)
        except BaseException as error:
            _log.exception("the engine stopped")
            self._fail_all(error)
        else:
            self._fail_all(EngineError("The engine was closed before the request ended."))

    def _take_inbox(self) -> bool:
        """Empty the inbox, sleeping while there is nothing to do; False when closing."""
        with self._wake:
            self._wake.notify_all()  # for drain
            self._wake.wait_for(lambda: self._closing or bool(self._inbox) or self.engine.has_work)
            if self._closing:
                return False
            while self._inbox:  # a stream that is dropped puts its abort there, even in the midst of this
                item = self._inbox.popleft()
                if isinstance(item, RequestHandle):
                    self._admit(item)
                else:
                    self.engine.abort(item)
        return True

    def _admit(self, handle: RequestHandle) -> None:
        try:
            self.engine.add_request(handle.request, handle._grammar)
        except Exception as error:
            handle._fail(error)
            return
        self._handles[handle.request.request_id] = handle
        handle._is_admitted = True
        handle._accepted.set()

    def _dispatch(self, delta: Delta) -> None:
        handle = self._handles.get(delta.request_id)
        if handle is not None and handle._deliver(delta):
            with self._wake:
                del self._handles[delta.request_id]

    def _fail_all(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            waiting = [*self._handles.values(), *(i for i in self._inbox if isinstance(i, RequestHandle))]
            self._handles.clear()
            self._inbox.clear()
            self._wake.notify_all()
        for handle in waiting:
            handle._fail(error)
