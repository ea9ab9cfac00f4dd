"""`up --autoscale`: workers come with the load and leave after it, and no answer is lost."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.support.deployments import Served, demo_config, served, wait_until

#: No first token comes within a microsecond.
FLAGS = ("--slo", "ttft=0.001,tpot=1000", "--most", "2", "--interval", "0.1")


def test_a_late_deployment_gets_a_worker_and_an_idle_one_gives_it_back(tmp_path: Path) -> None:
    config = demo_config(
        "agg", tmp_path / "run", engine="recording", engine_configs={}, agg_workers=1, autoscale=FLAGS
    )
    is_enough = threading.Event()
    answers: list[int] = []

    def ask() -> None:
        while not is_enough.is_set():
            answer = deployed.openai.completions.create(
                model="demo", prompt=[5, 6, 7], max_tokens=9, extra_body={"ignore_eos": True}
            )
            answers.append(answer.usage.completion_tokens if answer.usage else 0)

    with served(config) as deployed:
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            wait_until(lambda: states(deployed) == ["ready", "ready"], "a second worker is ready", 60)
        finally:
            is_enough.set()
            asking.join()
        wait_until(lambda: states(deployed) == ["ready"], "one of them has left", 60)
    assert set(answers) == {9}
    said = (config.run_dir / "autoscale.log").read_text()
    assert "2 agg: agg is late" in said
    assert "1 agg: the limits are kept, and agg is used to 0%" in said


def states(deployed: Served) -> list[str]:
    return [process.state for process in deployed.deployment.of_role("agg")]
