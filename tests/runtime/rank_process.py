"""One rank of a job in a process of its own, over the toy model: what test_rank_job.py starts.

Arguments: a mode (ok, die, raise, hang, stop, other-release, refuse-to-load), the rank that misbehaves, the call at which it
does. AHEAD=1: sessions launch ahead. Rank 0 prints the ids it generated as JSON, the others what they were told to do; every rank
prints its error, and exits as the command line would.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_model import FakeSession, byte_tokenizer, fake_manifest
from harness import all_ids

from glm_mtp_export.errors import EngineError, GlmMtpError
from glm_mtp_export.runtime.ahead import HostAheadSession
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.rank_job import JobIdentity, follow, lead
from glm_mtp_export.runtime.rank_link import RankTimeouts
from glm_mtp_export.runtime.rank_place import place_from_environment
from glm_mtp_export.runtime.request import Request
from glm_mtp_export.runtime.sampling import SamplingParams

TIMEOUTS = RankTimeouts(join=20, silence=2, step=float(os.environ.get("STEP_SECONDS", "3")), grace=1)


class Group:
    """The cards' group: a call of a rank waits for all, so one that is lost leaves the others waiting until aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def check(self) -> None:
        pass

    def abort(self) -> None:
        if os.environ.get("ABORT_IS_DEAF") != "1":
            self.aborted.set()


class Session(FakeSession):
    """The toy model; misbehaves at one call, and on the other ranks that call then never ends by itself."""

    group: Group
    rank = 0
    num_run = 0

    def run(self, inputs):  # type: ignore[no-untyped-def]
        mode, culprit, at = MODE, CULPRIT, AT
        self.num_run += 1
        if self.num_run == at and mode in ("die", "raise", "hang", "stop"):
            if self.rank == culprit:
                if mode == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if mode == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if mode == "raise":
                    raise EngineError("the card fell off the bus")
            self.group.aborted.wait(60)
            raise EngineError("a collective was aborted")
        return super().run(inputs)


class Ahead(HostAheadSession):
    """The toy model, launching ahead; counts what it is told."""

    num_launches = num_continued = num_masks = 0

    def launch(self, inputs, follows=None):  # type: ignore[no-untyped-def]
        self.num_launches += 1
        self.num_continued += follows is not None
        super().launch(inputs, follows)

    def supply_bitmask(self, token_bitmask):  # type: ignore[no-untyped-def]
        self.num_masks += 1
        super().supply_bitmask(token_bitmask)


class Loader:
    """Makes the session; the group's name must be the one that rank 0 gave."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name_group(self) -> bytes:
        return b"the group"

    def load(self, group_name, on_group):  # type: ignore[no-untyped-def]
        assert group_name == b"the group"
        if MODE == "refuse-to-load" and self.rank == CULPRIT:
            raise EngineError("no room for the weights")
        time.sleep(0.2 * self.rank)
        group = Group()
        on_group(group)
        session = Session(fake_manifest(3), num_pages=64)
        session.group, session.rank = group, self.rank
        self.session = Ahead(session) if os.environ.get("AHEAD") == "1" else session
        return self.session


def generated(session) -> list[list[int]]:  # type: ignore[no-untyped-def]
    engine = Engine(session, byte_tokenizer())
    for index, text in enumerate((b"one prompt", b"another, longer prompt" * 5)):
        params = SamplingParams(max_tokens=24, temperature=0.7, seed=index, min_tokens=12 * index)
        engine.add_request(Request(f"r{index}", tuple(text), params))
    return all_ids(engine)


def main() -> int:
    place = place_from_environment()
    if place is None:
        session = Session(fake_manifest(3), num_pages=64)
        print(json.dumps(generated(session)))
        return 0
    release = "2" if MODE == "other-release" and place.rank == CULPRIT else "1"
    identity = JobIdentity(release, "digest", "toy")
    try:
        if place.rank:
            loader = Loader(place.rank)
            told = {"calls": follow(place, identity, loader, TIMEOUTS)}
            if isinstance(loader.session, Ahead):
                session = loader.session
                told |= {
                    "launches": session.num_launches,
                    "continued": session.num_continued,
                    "masks": session.num_masks,
                }
            print(json.dumps(told))
            return 0
        leader = lead(place, identity, Loader(0), TIMEOUTS)
        ids = generated(leader)
        leader.close()
        print(json.dumps(ids))
    except GlmMtpError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    MODE, CULPRIT, AT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format=f"rank {os.environ.get('RANK', '-')}: %(levelname)s %(message)s")
    sys.exit(main())
