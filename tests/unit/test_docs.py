"""What README and docs name exists: files, links, commands and their flags."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import reference
from trtllm_disagg.common.cli import COMMANDS, actions_of, main
from trtllm_disagg.config.args import add_worker_arguments

ROOT = Path(__file__).parents[2]
#: Not the changelog, the log and the decisions: those describe their time.
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")], key=str)
PAGES = [
    page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name not in ("decisions", "log")
]

_PATH = re.compile(
    r"`((?:trtllm_disagg|handlers|launch|deploy|tests|tools|engine_configs|requirements)/[\w/.-]+)`"
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_COMMAND = re.compile(rf"trtllm-disagg ({'|'.join(COMMANDS)})\b(?!-)((?:[^`\n]|\\\n)*)")
_FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
#: Flags of other programs that pages name.
_FOREIGN_FLAGS = {
    *("--build-arg", "--gpus", "--hostname", "--ipc", "--network", "--ulimit", "--user"),  # docker
    *("--mpi", "--signal", "--batch"),  # srun and scancel
    *("--migration-limit", "--enable-anthropic-api"),  # Dynamo's frontend
    "--device",  # benchmarks/transfer.py
    *(
        "--endpoint-type",
        "--extra-inputs",
        "--goodput",
        "--request-rate",
        "--connection-reuse-strategy",
    ),  # AIPerf
    *(
        "--artifact-dir",
        "--random-seed",
        "--no-parameter-sweep-same-seed",
        "--tokenizer",
        "--no-fixed-schedule",
    ),
    *("--isl", "--isl-stddev", "--osl", "--osl-stddev", "--input-file", "--custom-dataset-type"),
    *("--conversation-turn-mean", "--conversation-turn-stddev", "--shared-system-prompt-length"),
    *("--prompt-prefix-length", "--prompt-prefix-pool-size", "--arrival-pattern", "--arrival-smoothness"),
    *("--extra-index-url", "--no-deps"),  # pip
    "--record-durations",  # pytest, by tests/support/durations.py
    *("--dry-run", "--only", "--source"),  # tools/
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def help_of(*command: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code in (None, 0)
    return shown.getvalue()


def help_of_benchmark(name: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        import_module(f"benchmarks.{name}").main(["--help"])
    return shown.getvalue()


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path for path in _PATH.findall(text) if not re.search("[A-Z]{3}", path)}
    missing = {path for path in named if not (ROOT / path).exists()}
    missing |= {link for link in _LINK.findall(text) if not (page.parent / link).exists()}
    assert not missing


@every_page
def test_flags_of_commands_that_a_page_shows_exist(page: Path) -> None:
    unknown = []
    for name, arguments in _COMMAND.findall(page.read_text(encoding="utf-8")):
        told = set(_FLAG.findall(help_of(name)))
        # What stands in quotes is for the workers.
        flags = _FLAG.findall(re.sub(r"'[^']*'|#.*", "", arguments))
        unknown += [(name, flag) for flag in flags if flag not in told]
    assert not unknown


@cache
def known_flags() -> frozenset[str]:
    """Every flag of every command, those of workers that no help shows included."""
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    of_workers = {option for action in actions_of(parser) for option in action.option_strings}
    helps = [*map(help_of, COMMANDS), *map(help_of_benchmark, ("orders", "overhead", "scenarios"))]
    return frozenset(of_workers | set(_FLAG.findall(" ".join(helps))))


@every_page
def test_every_flag_in_backticks_on_a_page_exists(page: Path) -> None:
    text = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    shown = {flag for code in _CODE.findall(text) for flag in _FLAG.findall(code)}
    known = known_flags() | _FOREIGN_FLAGS
    # `--nats-tls-*` stands for several.
    unknown = [f for f in shown - known if not f.endswith("-") or not any(k.startswith(f) for k in known)]
    assert unknown == []


def test_the_first_hour_has_ten_commands_each_with_what_it_prints_and_where_to_look_else() -> None:
    _, *steps = re.split(r"^## \d+\. ", (DOCS / "how-to" / "first-hour.md").read_text(), flags=re.MULTILINE)
    assert len(steps) == 10
    for step in steps:
        assert re.search(r"^    \S.*\n\n\*\*Prints\*\* .*\*\*Else\*\*: ", step, re.MULTILINE | re.DOTALL), (
            step
        )
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "how-to" / "index.md"):
        assert "first-hour.md)" in page.read_text()


def test_pages_that_the_code_names_exist() -> None:
    folders = (
        "trtllm_disagg",
        "handlers",
        "tests",
        "scripts",
        "launch",
        "deploy",
        "engine_configs",
        "requirements",
    )
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".yaml")
    ]
    files.append(ROOT / "pyproject.toml")
    named = {
        page
        for path in files
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not {page for page in named if not (ROOT / page).exists()}


def test_every_name_of_code_on_the_page_for_extensions_is_defined() -> None:
    text = (DOCS / "how-to" / "extend.md").read_text()
    folders = ("trtllm_disagg", "handlers", "scripts", "examples", "tests")
    files = [path for each in folders for path in (ROOT / each).rglob("*.py") if path != Path(__file__)]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    modules = {name for name in re.findall(r"\bscripts\.\w+", text) if find_spec(name) is None}
    names = {
        part for name in _CODE.findall(text) if re.fullmatch(r"[\w.]+", name) for part in name.split(".")
    }
    definition = r"\b(class|def) {0}\b|^\s*{0}\b[^=\n(]*[:=]|[\"']{0}[\"']"
    there = names - {path.stem for path in files} - {path.parent.name for path in files} - {"py"}
    undefined = {name for name in there if not re.search(definition.format(name), code, re.MULTILINE)}
    assert len(there) > 15
    assert not undefined | modules


@pytest.mark.parametrize("kind", reference.API, ids=lambda kind: kind.__name__)
def test_each_member_on_the_page_of_the_api_exists_and_has_a_meaning(kind: type) -> None:
    members = reference.public_members(kind)
    shown = reference.API[kind] or tuple(members)
    assert shown
    assert not [name for name in shown if not reference.first_paragraph(members[name])]
    assert reference.first_paragraph(kind)


def test_sed_line_of_the_page_replaces_dynamo_trtllm_in_scripts(tmp_path: Path) -> None:
    (line,) = re.findall(
        r"^    (sed .*)$", (DOCS / "reference/from-dynamo-trtllm.md").read_text(), re.MULTILINE
    )
    script = tmp_path / "disagg.sh"
    # As launch scripts and manifests have it.
    script.write_text(
        'CUDA_VISIBLE_DEVICES=0 python3 -m dynamo.trtllm \\\nWORKER_MODULE="dynamo.trtllm"\n- dynamo.trtllm\n'
    )
    subprocess.run(shlex.split(line), cwd=tmp_path, check=True)
    assert script.read_text().count("trtllm_disagg.worker") == 3
    assert "dynamo.trtllm" not in script.read_text()
    assert find_spec("trtllm_disagg.worker.__main__") is not None


# -- the pages that are made from the code say what the code says


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_reference_page_is_up_to_date(name: str) -> None:
    assert (reference.FOLDER / name).read_text(encoding="utf-8") == reference.PAGES[name](), (
        "python -m scripts.reference writes it"
    )


def test_the_page_of_errors_has_the_exception_and_status_that_leave_a_worker() -> None:
    rows = [line for line in reference.PAGES["errors.md"]().splitlines() if line.startswith("| `")]
    cells = {
        row[0]: row[1:4] for row in ([cell.strip(" `") for cell in line.split("|")[1:]] for line in rows)
    }
    assert cells["RequestCancelledError"] == ["Cancelled", "CannotConnect", "503"]
    assert cells["WorkerLeavingError"] == ["Leaving", "EngineShutdown", "503"]
    assert cells["StageTimeoutError"] == ["DeadlineExceeded", "ConnectionTimeout", "504"]
