"""The server's own OpenAPI description, used against it."""

from __future__ import annotations

from typing import Any

import pytest
from server_process import RunningServer, wait_until

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models/{model_id}", "/health"])
def test_generated_requests_never_meet_a_server_error(shared_server: RunningServer, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")
    method = "POST" if path.endswith("completions") else "GET"
    operation = schema[path][method]

    def strategy(mode: Any) -> Any:
        return operation.as_strategy(generation_mode=mode)

    modes = list(schemathesis.GenerationMode)
    assert len(modes) == 2  # valid and invalid requests

    @hypothesis.given(case=hypothesis.strategies.one_of(*map(strategy, modes)))
    @hypothesis.settings(
        max_examples=150,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = min(case.body.get("max_tokens") or 4, 4) if _is_number(case.body) else 4
        response = case.call(timeout=30)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    wait_until(shared_server.is_idle)
    assert shared_server.get("/health").status_code == 200


def _is_number(body: dict[str, Any]) -> bool:
    value = body.get("max_tokens")
    return isinstance(value, int) and not isinstance(value, bool)


def test_description_names_the_fields_and_no_422(shared_server: RunningServer) -> None:
    description = shared_server.get("/openapi.json").json()
    body = description["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "tools", "stream", "response_format", "thinking_budget"} <= set(body)
    for operation in description["paths"].values():
        for method in operation.values():
            assert "422" not in method["responses"]
