"""The chart of a worker's life in the documentation is made from the table."""

from __future__ import annotations

from pathlib import Path

from trtllm_disagg.worker.life import TABLE, Event, State

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "structure.md"


def chart() -> str:
    """Each arrow has the events that go along it; what changes no state is left out."""
    lines = ["```mermaid", "stateDiagram-v2", f"  [*] --> {State.LOADING.value}"]
    for state in State:
        for then in State:
            along = [event.value for event in Event if TABLE[state, event][0] is then is not state]
            if along:
                lines.append(f"  {state.value} --> {then.value}: {'<br/>'.join(along)}")
    return "\n".join([*lines, f"  {State.OVER.value} --> [*]", "```"])


def test_the_chart_in_the_documentation_is_the_table() -> None:
    assert chart() in PAGE.read_text(), f"{PAGE.name} lacks:\n{chart()}"
