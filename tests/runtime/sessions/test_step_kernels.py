"""The launches around a step as the plugin library gets them: fields where the C header has them, failures with its words."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.sessions.step_kernels import (
    CARRY_NAMES,
    HISTORY_NAMES,
    RESULT_NAMES,
    STATE_NAMES,
    StepKernels,
)
from glm_mtp_export.runtime.thinking import ThinkingIds

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
INCLUDE = Path(__file__).parents[3] / "plugins" / "kernels" / "include"

# Writes every field it was given, by the header's names, into `seen`.
LIBRARY = """
#include <glm_kernels/step_ahead.h>
long long seen[40];
static int state(const GlmStepState* s, int n) {
  const void* pointers[] = {%(state)s};
  for (int i = 0; i < 8; ++i) seen[n++] = (long long)pointers[i];
  seen[n++] = s->num_requests;
  seen[n++] = s->draft_width;
  seen[n++] = s->vocab_size;
  return n;
}
static int carry(const GlmCarry* c, int n) {
  const void* pointers[] = {%(carry)s};
  for (int i = 0; i < 5; ++i) seen[n++] = (long long)pointers[i];
  return n;
}
int glm_mtp_spread_histories(GlmHistories const* h, void* stream) {
  const void* pointers[] = {%(histories)s};
  for (int i = 0; i < 9; ++i) seen[i] = (long long)pointers[i];
  seen[9] = h->num_requests;
  seen[10] = h->vocab_size;
  seen[11] = (long long)stream;
  return 0;
}
int glm_mtp_follow_step(GlmStepState const* s, int32_t const* follows, GlmCarry const* c, void* stream) {
  int n = carry(c, state(s, 0));
  seen[n++] = (long long)follows;
  seen[n++] = (long long)stream;
  return 0;
}
int glm_mtp_carry_step(GlmStepState const* s, GlmStepResults const* r, GlmCarry const* c, void* stream) {
  if (!r->num_accepted) return -2;
  int n = carry(c, state(s, 0));
  const void* pointers[] = {%(results)s};
  for (int i = 0; i < 3; ++i) seen[n++] = (long long)pointers[i];
  seen[n++] = r->think;
  seen[n++] = r->think_end;
  seen[n++] = r->tool_call;
  seen[n++] = (long long)stream;
  return 0;
}
const char* glm_mtp_step_ahead_last_error(void) { return "num_accepted is null"; }
"""


class Queue:
    """A stream's handle."""

    handle = 1 << 40


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled against the header of the kernels."""
    path = tmp_path_factory.mktemp("library") / "stand_in.so"
    fields = {"state": ("s", STATE_NAMES), "carry": ("c", CARRY_NAMES), "results": ("r", RESULT_NAMES)}
    found = {key: ", ".join(f"{at}->{name}" for name in names) for key, (at, names) in fields.items()}
    found["histories"] = ", ".join(f"h->{name.removeprefix('history_')}" for name in HISTORY_NAMES)
    source = LIBRARY % found
    command = ["gcc", "-shared", "-fPIC", "-Werror", f"-I{INCLUDE}", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def seen(library: Path, count: int) -> list[int]:
    """What the last launch was given."""
    return list((ctypes.c_longlong * 40).in_dll(ctypes.CDLL(str(library)), "seen"))[:count]


STATE = {name: (10 + i) << 36 for i, name in enumerate(STATE_NAMES)}
CARRY = {name: (20 + i) << 36 for i, name in enumerate(CARRY_NAMES)}
RESULTS = {name: (30 + i) << 36 for i, name in enumerate(RESULT_NAMES)}


def test_every_field_is_where_the_header_has_it(library: Path) -> None:
    kernels = StepKernels(library, 3, 1000, ThinkingIds(begin=151, end=152))
    kernels.follow(STATE, 77, 40 << 36, CARRY, Queue())  # type: ignore[arg-type]
    common = [*STATE.values(), 77, 3, 1000, *CARRY.values()]
    assert seen(library, 18) == [*common, 40 << 36, Queue.handle]
    kernels.carry(STATE, 77, RESULTS, CARRY, Queue())  # type: ignore[arg-type]
    assert seen(library, 23) == [*common, *RESULTS.values(), 151, 152, -1, Queue.handle]
    without = {name: RESULTS[name] for name in RESULT_NAMES[:2]}
    kernels.carry(STATE, 77, without, CARRY, Queue())  # type: ignore[arg-type]
    assert seen(library, 19)[16:] == [*without.values(), 0]
    histories = {name: (50 + i) << 36 for i, name in enumerate(HISTORY_NAMES)}
    kernels.spread(histories, 77, Queue())  # type: ignore[arg-type]
    assert seen(library, 12) == [*histories.values(), 77, 1000, Queue.handle]
    no_bias = {name: address for name, address in histories.items() if name not in ("bias_ids", "bias_values")}
    kernels.spread(no_bias, 77, Queue())  # type: ignore[arg-type]
    assert seen(library, 5)[3:] == [0, 0]


def test_a_failed_launch_has_the_librarys_words(library: Path) -> None:
    kernels = StepKernels(library, 1, 1000, ThinkingIds())
    with pytest.raises(EngineError, match=r"around a step failed \(-2\): num_accepted is null"):
        kernels.carry(STATE, 1, {}, CARRY, Queue())  # type: ignore[arg-type]


def test_an_older_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input="int x;", text=True, check=True)
    with pytest.raises(EngineError, match=r"old\.so: the plugin library is of an older release .*build-plugins"):
        StepKernels(path, 1, 1000, ThinkingIds())
