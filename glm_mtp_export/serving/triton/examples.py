"""Client examples for a generated model repository: made with the model's own names, run by a test against a real server."""

from __future__ import annotations

from glm_mtp_export.serving.triton.fields import INPUTS, OUTPUTS, Field

__all__ = ["grpc_example", "http_example", "readme"]

_HTTP = """#!/bin/sh
# One prompt is one request: max_batch_size is 0 and shapes are [1]. Two prompts are two requests; the engine batches them.
URL="${TRITON_URL:-http://127.0.0.1:8000}"

# one response
curl -sS "$URL/v2/models/@PLAIN@/generate" -d '{
  "text_input": "Hello", "sampling_param_max_tokens": 32, "sampling_param_temperature": 0.0
}'
echo

# the same as a plain inference request: strings are BYTES, shapes as in config.pbtxt
curl -sS "$URL/v2/models/@PLAIN@/infer" -d '{
  "inputs": [
    {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]},
    {"name": "sampling_param_max_tokens", "datatype": "INT32", "shape": [1], "data": [32]},
    {"name": "sampling_param_stop", "datatype": "BYTES", "shape": [2], "data": ["END", "STOP"]}
  ],
  "outputs": [{"name": "text_output"}, {"name": "finish_reason"}]
}'
echo

# a conversation, streamed: one event a piece of text
curl -sSN "$URL/v2/models/@STREAMING@/generate_stream" -d '{
  "messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"Hello\\"}]",
  "streaming": true, "sampling_param_max_tokens": 64
}'
"""

_GRPC = '''"""Stream a conversation over gRPC. Needs: pip install 'tritonclient[grpc]'."""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as grpcclient

url, content = (sys.argv[1:] + ["127.0.0.1:8001", "Hello"][len(sys.argv) - 1 :])[:2]


def tensor(name, datatype, values):
    dtype = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}[datatype]
    found = grpcclient.InferInput(name, [len(values)], datatype)
    found.set_data_from_numpy(np.array(values, dtype=dtype))
    return found


inputs = [
    tensor("messages", "BYTES", [json.dumps([{"role": "user", "content": content}]).encode()]),
    tensor("streaming", "BOOL", [True]),
    tensor("sampling_param_max_tokens", "INT32", [64]),
]
answers = queue.SimpleQueue()
with grpcclient.InferenceServerClient(url) as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("@STREAMING@", inputs, enable_empty_final_response=True)
    while True:
        result, error = answers.get()
        if error is not None:
            print(error, file=sys.stderr)
            break
        for name in ("reasoning_content", "text_output"):
            found = result.as_numpy(name)
            if found is not None:
                print(found[0].decode(), end="", flush=True)
        if result.get_response().parameters["triton_final_response"].bool_param:
            rate = result.as_numpy("acceptance_rate")
            print(f"\\nacceptance rate {rate[0]:.2f}" if rate is not None else "")
            break
sys.exit(error is not None)
'''

_README = """# Triton models

`@STREAMING@` streams (decoupled): use `generate_stream` or a gRPC stream; with `streaming` false it gives one response.
`@PLAIN@` gives exactly one response: use `generate` or `infer`. Both run on one engine process.

    tritonserver --model-repository THIS_FOLDER

- `max_batch_size` is 0: one request is one prompt, every shape is `[1]` (`[n]` for lists). Two prompts are two requests,
  which the engine batches by itself. Strings are UTF-8 BYTES.
- Cancelling a request, or closing its connection, ends it within one step of the engine.
- A full queue answers UNAVAILABLE, a request that cannot be served INVALID_ARG. gRPC shows these codes; on HTTP some
  versions of Triton answer every error of a model with 400, so look at the message.
- Triton's /metrics has the engine's numbers as `glm_mtp_*`; `glm_mtp_engine_up` is 0 when the engine has failed.
- If the log says that the stub is not healthy or numpy cannot be imported: give the stub an environment of its own
  (`glm-mtp triton ... --execution-environment`), with numpy before 2 for servers up to 24.12. The engine is not affected,
  it runs in its own process.

Examples: `client_http.sh`, `client_grpc.py`.

## Inputs

@INPUTS@

## Outputs

@OUTPUTS@
"""


def http_example(streaming: str, plain: str) -> str:
    """A shell script of curl commands."""
    return _named(_HTTP, streaming, plain)


def grpc_example(streaming: str, plain: str) -> str:
    """A Python script for a gRPC stream."""
    return _named(_GRPC, streaming, plain)


def readme(streaming: str, plain: str) -> str:
    """What the folder is, and its fields."""
    text = _named(_README, streaming, plain)
    return text.replace("@INPUTS@", _table(INPUTS)).replace("@OUTPUTS@", _table(OUTPUTS))


def _named(text: str, streaming: str, plain: str) -> str:
    return text.replace("@STREAMING@", streaming).replace("@PLAIN@", plain)


def _table(fields: tuple[Field, ...]) -> str:
    rows = [f"| {f.name} | {f.data_type} | [{f.dims}] | {f.doc} |" for f in fields]
    return "\n".join(["| name | type | shape | meaning |", "|---|---|---|---|", *rows])
