"""The generated tables of the plugin library: current, and right for shapes that need arithmetic."""

from __future__ import annotations

import pytest

from glm_mtp_export.engine.plugin_table import SKIN, generated, postfix, symbols
from glm_mtp_export.ops import OP_TABLE
from glm_mtp_export.ops.record import Attribute, OpRecord, Port


def test_generated_files_are_current() -> None:
    stale = [name for name, text in generated().items() if (SKIN / name).read_text(encoding="utf-8") != text]
    assert not stale, "run python -m glm_mtp_export.engine.plugin_table"


def test_every_op_has_exactly_one_binding() -> None:
    text = (SKIN / "bindings.cpp").read_text(encoding="utf-8")
    assert {name: text.count(f'{{"{name}",') for name in OP_TABLE} == dict.fromkeys(OP_TABLE, 1)
    assert text.count('{"Glm') == len(OP_TABLE)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("T", "T"),
        ("64", "64"),
        ("2I", "2 I *"),
        ("B+1", "B 1 +"),
        ("B*num_slots", "B num_slots *"),
        ("ceil(2I/128)", "2 I * 128 ceil"),
        ("max(top_n,1)", "top_n 1 max"),
        ("num_heads*(nope_dim+rope_dim)", "num_heads nope_dim rope_dim + *"),
        ("H-I-1", "H I - 1 -"),
    ],
)
def test_postfix(expression: str, expected: str) -> None:
    names = ("T", "I", "B", "H", "num_slots", "top_n", "num_heads", "nope_dim", "rope_dim")
    assert postfix(expression, names) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("Q", "'Q' is neither an int attribute nor a dimension of an input"),
        ("ceil(T*2)", "ceil() takes a quotient"),
        ("T)", "')' is left over"),
        ("(T", "expected ')'"),
        ("T+", "ends too early"),
        ("T%2", "cannot read '%2'"),
    ],
)
def test_postfix_refuses(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"dimension") as error:
        postfix(expression, ("T",))
    assert message in str(error.value)


def record(inputs: tuple[Port, ...], output: str) -> OpRecord:
    def nothing() -> None:
        raise NotImplementedError

    attribute = (Attribute("width", "int"),)
    return OpRecord("GlmProbe", "", inputs, (Port("y", "A", (output,)),), attribute, nothing, nothing, None)


def test_plainest_dimension_gives_a_symbol() -> None:
    ports = (Port("a", "A", ("B+1",)), Port("b", "A", ("2I", "width")), Port("c", "A", ("B", 64)))
    found = {s.name: (s.slot, s.axis, s.scale, s.offset) for s in symbols(record(ports, "B"))}
    assert found == {"B": (2, 0, 1, 0), "I": (1, 0, 2, 0)}


def test_a_dimension_that_nothing_gives_is_refused_by_op() -> None:
    probe = record((Port("a", "A", ("T",)),), "T*M")
    with pytest.raises(ValueError, match=r"op GlmProbe.*'M'"):
        generated({"GlmProbe": probe})
