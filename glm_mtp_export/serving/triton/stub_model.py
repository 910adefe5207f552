"""Triton's Python model: a bridge between Triton's requests and the engine process. Copied to `1/model.py`.

Both models of the repository are this file; the config says which one it is. Streaming (decoupled): any number of responses
a request. Plain: exactly one. Neither blocks Triton: requests are answered from the engine's events, so one instance serves
all clients at once.

Tensors are passed on by name: what a field means is decided in the engine process. Cancelled requests are noticed by asking
Triton a few times a second, and end within the engine's next step.

What may go wrong: asking about a request whose final response has been sent crashes the whole server (seen with 2.51), so
asking and sending exclude each other, and nothing is asked after the final response. No thread outlives `finalize`, since
the stub crashes when one calls into it while it is being taken down.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import engine_client
import numpy as np
import triton_python_backend_utils as pb_utils

_CANCEL_INTERVAL_SECONDS = 0.02
_NUMPY = {
    "TYPE_STRING": np.object_,
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
}
# What Triton itself puts among a request's parameters; anything else is a field the caller misspelt.
_TRITON_PARAMETERS = ("binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


class TritonPythonModel:
    """The interface Triton's Python backend asks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine process, or prepare to connect to it. An exception here fails the model's load."""
        config = json.loads(args["model_config"])
        parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        self._name = args["model_name"]
        self._is_streaming = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._output_types = {output["name"]: _NUMPY[output["data_type"]] for output in config["output"]}
        self._sibling = parameters["sibling"]
        self._live: dict[int, _Sender] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server_pid = os.getppid()
        path = engine_client.socket_path(parameters["engine_dir"], self._server_pid)
        command = None
        if self._is_streaming:
            command = [parameters["engine_python"] or sys.executable, "-m", "glm_mtp_export.serving.triton.worker"]
            command += ["--engine-dir", parameters["engine_dir"], "--backend", parameters["backend"]]
            command += ["--max-sequences", parameters["max_sequences"]]
        self._metrics = _Metrics(self._name) if self._is_streaming else None
        on_metrics = self._metrics.update if self._metrics else None
        self._client = engine_client.EngineClient(path, command, on_metrics, int(parameters["num_ranks"]))
        self._watcher = threading.Thread(target=self._watch_cancellations, name="cancellations", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Pass requests on; the answers come from the engine's events."""
        for request in requests:
            sender = _Sender(request.get_response_sender())
            try:
                self._submit(request, sender)
            except engine_client.EngineProcessError as error:
                sender.refuse("unavailable", str(error))
            except ValueError as error:
                sender.refuse("invalid", str(error))

    def finalize(self) -> None:
        """End the engine process with the model. Requests still open get an error first."""
        self._closing.set()
        self._watcher.join()
        self._client.close()
        if self._metrics is not None:
            self._metrics.clear()

    def _submit(self, request: Any, sender: _Sender) -> None:
        inputs = {tensor.name(): _values(tensor) for tensor in request.inputs()}
        self._check_parameters(request)
        if inputs.get("streaming", [False])[0] and not self._is_streaming:
            raise ValueError(
                f"streaming is true, but {self._name} gives one response. Use model {self._sibling} "
                "(generate_stream, or a gRPC stream), or leave streaming out."
            )

        def on_event(event: dict[str, Any]) -> None:
            if event["final"]:
                with self._lock:
                    self._live.pop(key, None)
            self._respond(sender, event)

        with self._lock:  # an event may come before submit has returned
            key = self._client.submit({"inputs": inputs}, on_event)
            self._live[key] = sender

    def _check_parameters(self, request: Any) -> None:
        parameters = json.loads(request.parameters() or "{}")
        unknown = [n for n in parameters if n not in _TRITON_PARAMETERS and not n.startswith("triton_")]
        if unknown:
            raise ValueError(f"unknown field {sorted(unknown)}. The config of {self._name} lists its inputs.")

    def _respond(self, sender: _Sender, event: dict[str, Any]) -> None:
        if event["type"] == "error":
            sender.refuse(event["code"], event["message"])
            return
        tensors = [self._tensor(name, values) for name, values in event["outputs"].items()]
        sender.send(pb_utils.InferenceResponse(output_tensors=tensors), is_final=event["final"])

    def _tensor(self, name: str, values: list[Any]) -> Any:
        kind = self._output_types[name]
        if kind is np.object_:
            return pb_utils.Tensor(name, np.array([value.encode("utf-8", "replace") for value in values], dtype=kind))
        return pb_utils.Tensor(name, np.array(values, dtype=kind))

    def _watch_cancellations(self) -> None:
        while not self._closing.is_set():
            if os.getppid() != self._server_pid:
                # A crashed server leaves its stubs behind, and with them the engine and the card's memory.
                self._client.close()
                os._exit(1)
            with self._lock:
                live = list(self._live.items())
            for key, sender in live:
                if sender.is_cancelled():
                    self._client.abort(key)
            # Asking costs Triton a message a request: ask less often the more there are.
            self._closing.wait(max(_CANCEL_INTERVAL_SECONDS, 0.001 * len(live)))


class _Sender:
    """The way back to one client. Its methods exclude each other: see the module's text."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._is_done = False

    def send(self, response: Any, *, is_final: bool) -> None:
        """Send one response; nothing after the final one."""
        with self._lock:
            if self._is_done:
                return
            self._is_done = is_final
            try:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0)
            except Exception as error:  # Triton has dropped the request; the engine's side ends by the cancellation
                pb_utils.Logger.log_warn(f"a response could not be sent: {error}")

    def refuse(self, code: str, message: str) -> None:
        """Send an error as the final response."""
        kinds = {
            "invalid": pb_utils.TritonError.INVALID_ARG,
            "unavailable": pb_utils.TritonError.UNAVAILABLE,
            "cancelled": pb_utils.TritonError.CANCELLED,
        }
        error = pb_utils.TritonError(message, kinds.get(code, pb_utils.TritonError.INTERNAL))
        self.send(pb_utils.InferenceResponse(output_tensors=[], error=error), is_final=True)

    def is_cancelled(self) -> bool:
        """True when the client has gone; False after the final response."""
        with self._lock:
            return not self._is_done and bool(self._sender.is_cancelled())


class _Metrics:
    """The engine's numbers on Triton's own /metrics, and whether its process is alive."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model": model_name}
        self._metrics: dict[str, Any] = {}
        self._families: list[Any] = []  # Triton drops a family that nobody holds
        self._last: dict[str, float] = {}

    def update(self, message: dict[str, Any]) -> None:
        """Take the newest numbers."""
        for name, value in message["gauges"].items():
            self._metric(name, pb_utils.MetricFamily.GAUGE).set(value)
        for name, value in message["counters"].items():
            self._metric(name, pb_utils.MetricFamily.COUNTER).increment(value - self._last.get(name, 0.0))
            self._last[name] = value

    def clear(self) -> None:
        """Give the metrics back while Triton still listens: a stub that exits with any of them crashes."""
        self._metrics.clear()
        self._families.clear()

    def _metric(self, name: str, kind: Any) -> Any:
        if name not in self._metrics:
            family = pb_utils.MetricFamily(name=f"glm_mtp_{name}", description=name.replace("_", " "), kind=kind)
            self._families.append(family)
            self._metrics[name] = family.Metric(labels=self._labels)
        return self._metrics[name]


def _values(tensor: Any) -> list[Any]:
    """A tensor as JSON values. Text must be UTF-8."""
    array = tensor.as_numpy()
    if array.dtype != np.object_:
        return list(array.reshape(-1).tolist())
    try:
        return [item.decode("utf-8") if isinstance(item, bytes) else str(item) for item in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise ValueError(f"{tensor.name()} is not valid UTF-8 (byte {error.start}). Encode it as UTF-8.") from error
