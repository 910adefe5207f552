"""A timing cache saves time and must never stop a build."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_mtp_export.engine.tensorrt import save_timing_cache, set_timing_cache


class FakeCache:
    """Bytes as the builder's cache object holds them."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> memoryview:
        """As the bindings give it."""
        return memoryview(self.content)


class FakeConfig:
    """The three calls of an IBuilderConfig; `damage` says what a bad cache makes it do."""

    def __init__(self, damage: str) -> None:
        self.damage = damage
        self.cache: FakeCache | None = None

    def create_timing_cache(self, content: bytes) -> FakeCache | None:
        """Accepts empty and well-formed content."""
        if content in (b"", b"good"):
            return FakeCache(content)
        if self.damage == "raises":
            raise RuntimeError("bad header")
        return None if self.damage == "none" else FakeCache(content)

    def set_timing_cache(self, cache: FakeCache, ignore_mismatch: bool) -> bool:
        """Refuses content it would have to reinterpret."""
        if cache.content not in (b"", b"good"):
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> FakeCache | None:
        """What the build filled."""
        return self.cache


@pytest.mark.parametrize("damage", ["raises", "none", "refuses"])
def test_a_damaged_cache_is_replaced_by_an_empty_one(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "timing.cache"
    path.write_bytes(b"zzz")
    config = FakeConfig(damage)
    assert not set_timing_cache(config, path)
    assert config.cache is not None
    assert config.cache.content == b""
    save_timing_cache(config, path)
    assert path.read_bytes() == b""


def test_a_good_cache_is_used_and_a_missing_one_made(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    config = FakeConfig("raises")
    assert not set_timing_cache(config, path)
    path.write_bytes(b"good")
    assert set_timing_cache(config, path)
    save_timing_cache(config, path)
    assert path.read_bytes() == b"good"
