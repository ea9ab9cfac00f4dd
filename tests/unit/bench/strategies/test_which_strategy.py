"""The page about which strategy is made from runs, and says which ones."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.bench.strategies.synthetic import Behaviour, saved
from tools.which_strategy import main

AGG, ORDER = "2 agg", "1P1D decode_first"


def test_the_page_has_a_line_a_run_and_workload_and_names_what_disaggregation_loses(tmp_path: Path) -> None:
    winning = saved(
        tmp_path / "a",
        {AGG: Behaviour(6, tpot=10), ORDER: Behaviour(12, tpot=20, strategy="decode_first")},
    )
    tied = saved(tmp_path / "b", {AGG: Behaviour(6), ORDER: Behaviour(6, strategy="decode_first")})
    main([str(winning.path), str(tied.path), "--out", str(tmp_path)])
    page = (tmp_path / "which-strategy.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| a model")]
    assert len(rows) == 2
    assert f"chat on 2 GPUs | **{ORDER}** | It answers up to" in rows[0]
    assert "chat on 2 GPUs | not decided | " in rows[1]
    assert "differ by less than 5%" in rows[1]
    losses = page.partition("## Where disaggregation loses")[2].partition("\n## ")[0]
    assert re.findall(r"2 agg is best by (\w+ \w+)", losses) == ["fast for", "TPOT p99"]
    pictures = re.findall(r"\]\((which-strategy/[^)]+\.png)\)", page)
    assert len(pictures) == 2 * 3
    assert all((tmp_path / picture).is_file() for picture in pictures)
