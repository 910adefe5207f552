"""The profiles that ship, and the shapes made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_mtp_export.artifact import PAGE_SIZE, Manifest, cache_specs, step_inputs, step_outputs
from glm_mtp_export.checkpoint.synthetic import T6_CONFIG, write_synthetic
from glm_mtp_export.config import SpeculationConfig, parse_config
from glm_mtp_export.engine.profile import EngineProfile, Span, load_profile, profile_names, shape_spans
from glm_mtp_export.engine.tensorrt import build
from glm_mtp_export.errors import EngineError, OptionError
from glm_mtp_export.export import ExportOptions, export_checkpoint


def manifest(num_speculative_tokens: int) -> Manifest:
    config = parse_config(T6_CONFIG, "T6")
    speculation = SpeculationConfig(num_speculative_tokens=num_speculative_tokens)
    caches = cache_specs(config, "device", "bfloat16", 1)
    return Manifest(
        dialect="device",
        dtype="bfloat16",
        cache_dtype="bfloat16",
        config=config,
        speculation=speculation,
        caches=caches,
        inputs=step_inputs(config, speculation, caches),
        outputs=step_outputs(speculation, caches),
        weights=(),
        ops={},
        semantics={},
        files={},
        tokenizer_size=config.vocab_size,
        thinking_token_ids={},
        checkpoint="",
    )


def test_every_shipped_profile_loads_and_one_is_there_for_each_use() -> None:
    names = profile_names()
    profiles = {name: load_profile(name) for name in names}
    assert {"nano-cpu", "nano-h200", "glm-5.2-fp8-h200x8", "glm-5.2-fp8-check", "glm-5.2-nvfp4-b200x8"} <= set(names)
    assert {profile.backend for profile in profiles.values()} == {"onnxruntime", "tensorrt", "tensorrt-rtx"}
    assert all(profile.name == name for name, profile in profiles.items())


def test_unknown_profile_offers_the_nearest() -> None:
    with pytest.raises(OptionError, match="Did you mean 'nano-h200'"):
        load_profile("nano-h20")


def test_broken_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("backend = ", encoding="utf-8")
    with pytest.raises(OptionError, match=r"mine\.toml: not a TOML file"):
        load_profile(str(path))


def test_spans_cover_every_dynamic_input_in_both_profiles() -> None:
    profile = EngineProfile("p", "tensorrt", 100, max_batch=8, max_rows=512, max_context=640, opt_batch=4, opt_rows=256)
    made = manifest(3)
    spans = shape_spans(made, profile)
    dynamic = {spec.name for spec in made.inputs if any(isinstance(extent, str) for extent in spec.shape)}
    assert list(spans) == ["prefill", "decode"]
    assert set(spans["prefill"]) == set(spans["decode"]) == dynamic
    assert spans["prefill"]["token_ids"] == Span((1,), (256,), (512,))
    assert spans["decode"]["token_ids"] == Span((1,), (16,), (32,))
    assert spans["decode"]["row_offsets"] == Span((2,), (5,), (9,))
    # 640 positions are ten pages; a last call may name an eleventh for drafts.
    assert spans["decode"]["block_table"] == Span((1, 1), (4, 11), (8, 11))
    assert spans["prefill"]["target_mla"].largest == made.caches[0].shape(100)
    assert spans["prefill"]["target_mla"].largest[2] == PAGE_SIZE


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 5])
def test_smallest_tuned_and_largest_never_cross(num_speculative_tokens: int) -> None:
    for name in profile_names():
        for spans in shape_spans(manifest(num_speculative_tokens), load_profile(name)).values():
            for span in spans.values():
                for small, tuned, large in zip(span.smallest, span.tuned, span.largest, strict=True):
                    assert 1 <= small <= tuned <= large


def test_a_profile_for_other_ranks_than_the_artifact_is_refused(tmp_path):
    checkpoint = write_synthetic(tmp_path / "t6")
    artifact = tmp_path / "artifact"
    export_checkpoint(checkpoint, artifact, ExportOptions(dialect="device", dtype="bfloat16"))
    with pytest.raises(EngineError, match=r"sized for 8 ranks, .* was exported for 1"):
        build(artifact, load_profile("glm-5.2-fp8-h200x8"))
