"""Events as text and as JSON."""

from __future__ import annotations

import json
import logging

import pytest
from harness import bench

from glm_mtp_export.runtime.logs import JsonFormatter, log_event
from glm_mtp_export.runtime.sampling import SamplingParams


def test_a_finished_sequence_is_one_event_with_its_counts(caplog: pytest.LogCaptureFixture) -> None:
    b = bench()
    with caplog.at_level(logging.INFO):
        b.add("chat 7", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        b.run()
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "sequence_finished"]
    entry = json.loads(JsonFormatter().format(record))
    assert entry["request_id"] == "chat 7" and entry["reason"] == "length" and entry["level"] == "info"
    assert (entry["num_prompt_tokens"], entry["num_output_tokens"], entry["num_calls"]) == (3, 5, 2)
    assert 0 <= entry["time_to_first_token"] <= entry["seconds"]
    assert 'request_id="chat 7" index=0 reason=length' in record.getMessage()


def test_ordinary_records_and_exceptions_are_json_too() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("name", logging.ERROR, "file", 1, "it %s", ("failed",), info)
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "it failed" and "ValueError: no" in entry["exception"]


def test_events_that_are_off_are_not_formatted() -> None:
    class Untouchable:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    logger = logging.getLogger("glm_mtp_export.test_logs")
    logger.setLevel(logging.WARNING)
    log_event(logger, logging.INFO, "event", value=Untouchable())
