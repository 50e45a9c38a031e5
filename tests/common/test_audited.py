"""Lines of the audit, as people are shown them."""

from typing import Any

from penstock.common.audited import joined


def line(front_end: str, time: str, result: str) -> dict[str, Any]:
    return {"front_end": front_end, "call": 1, "time": time, "act": "purge", "result": result}


def test_how_an_act_has_ended_is_told_apart_by_front_end() -> None:
    """Each numbers its own."""
    lines = [line("a", "1", "begun"), line("b", "2", "begun"), line("a", "3", "done")]
    assert joined(lines) == [line("a", "1", "done"), line("b", "2", "begun")]
    assert joined([line("a", "1", "begun"), line("b", "2", "conflict")]) == [
        line("a", "1", "begun"),
        line("b", "2", "conflict"),
    ]
