"""Imports go one way, and few files know Dynamo or TensorRT-LLM. Read from the source, lazy imports too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "trtllm_disagg"
ROOT = Path(__file__).parents[2] / PACKAGE

#: Packages, and files at the top, from the bottom up. A module imports from its own layer and from those below; the
#: longest name counts.
LAYERS = (
    ("", "common", "errors", "strategies", "tracing", "types"),
    ("wire",),
    ("engine",),
    ("config",),
    ("admin",),
    ("handlers",),
    ("dynamo_runtime",),
    ("prefill_queue",),
    ("worker", "__main__"),
    ("engines.embedded.kv_transfer", "engines.embedded.ipc", "engines"),
    ("engines.embedded.cpu_kernels",),
    ("engines.embedded.params",),
    ("engines.embedded.kv_cache",),
    ("engines.embedded.model",),
    ("engines.embedded.scheduler",),
    ("engines.embedded.tensor_parallel",),
    ("engines.embedded.connector",),
    ("engines.embedded.core",),
    ("engines.embedded.api",),
    ("engines.embedded", "engines.demo_model"),
    ("engines.modelled", "engines.recording"),
    ("tools.up", "tools"),
    ("tools.plan",),
    ("tools.top",),
    ("tools.admin", "tools.trace", "tools.doctor"),
    ("tools.demo", "tools.completion"),
)

#: These run on Dynamo, and nothing else may need it.
DYNAMO = (
    "dynamo_runtime",
    "tools.admin.controller",  # calls workers and reads the planner from outside
    "tools.up.lifecycle",  # asks whether it is installed
)

#: Import names of TensorRT-LLM. Whether it is installed is asked by the table of engines.
TENSORRT_LLM = ("engine.llm_api",)

#: The engine serves every client of the LLM API; it knows none of them.
NOT_FOR_EMBEDDED = (
    "handlers",
    "worker",
    "dynamo_runtime",
    "config",
    "common.cli",
    "engine.engine",
    "engine.llm_api",
)

#: Functions that import by a name in their first argument.
IMPORTERS = ("import_module", "find_spec", "__import__")


def modules() -> dict[str, Path]:
    """Name inside the package -> file. `handlers` is a link, which rglob does not follow."""
    files = [*ROOT.rglob("*.py"), *(ROOT / "handlers").rglob("*.py")]
    return {_name(file): file for file in files}


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[str]:
    """The absolute name of everything that a file imports, `from x import y` as x.y."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and _function(node) in IMPORTERS:
            yield from _start_of_text(node.args[0])


def _function(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _start_of_text(node: ast.expr) -> Iterator[str]:
    """What a text or an f-string starts with; nothing for a variable."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0] if isinstance(node.values[0], ast.Constant) else node
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def own_imports(file: Path) -> set[str]:
    """The modules of this package that a file imports, by their names inside it."""
    found = set()
    for name in imports(file):
        if is_in(name, PACKAGE):
            inside = name.removeprefix(PACKAGE).removeprefix(".")
            found.add(inside if inside in MODULES else inside.rpartition(".")[0])
    return found


def layer_of(module: str) -> int:
    fitting = [
        (len(name), layer)
        for layer, names in enumerate(LAYERS)
        for name in names
        if is_in(module, name) or not name
    ]
    _, layer = max(fitting)
    return layer


MODULES = modules()
NAMES = sorted(MODULES)


def test_layers_are_packages_each_in_one_layer() -> None:
    names = [name for names in LAYERS for name in names]
    assert len(set(names)) == len(names)
    # It has the flags of every command, of whatever package of tools/.
    files = ["tools.completion"]
    assert [name for name in names if "." in name and package_of(name) != name] == files


def test_every_module_has_a_layer() -> None:
    unknown = [
        name for name in NAMES if name and not any(is_in(name, n) for names in LAYERS for n in names if n)
    ]
    assert unknown == []


@pytest.mark.parametrize("module", NAMES)
def test_imports_go_one_way(module: str) -> None:
    upwards = [name for name in own_imports(MODULES[module]) if layer_of(name) > layer_of(module)]
    assert upwards == [], f"{module} imports from a layer above it"


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every group of nodes that reach each other, sorted."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            if (node := todo.pop()) not in found:
                found.add(node)
                todo += graph.get(node, ())
        return found

    reach = {node: reached(node) for node in graph}
    groups = {
        tuple(sorted(other for other in reach[node] if node in reach[other]))
        for node in graph
        if node in reach[node]
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def package_of(module: str) -> str:
    """A file at the top is a package of its own."""
    is_package = MODULES[module].name == "__init__.py"
    parent = module.rpartition(".")[0]
    return module if is_package or not parent else parent


def all_imports() -> dict[str, set[str]]:
    """Includes imports for types: a reader of one file of a circle has to read all of them."""
    return {name: own_imports(MODULES[name]) - {name} for name in NAMES}


def test_no_two_files_import_each_other() -> None:
    assert circles(all_imports()) == []


def test_no_two_packages_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name, targets in all_imports().items():
        package = package_of(name)
        graph.setdefault(package, set()).update(package_of(t) for t in targets if package_of(t) != package)
    assert circles(graph) == []


def test_types_import_only_spans_and_errors_nothing() -> None:
    assert own_imports(MODULES["types"]) == {"tracing.spans"}
    assert own_imports(MODULES["tracing.spans"]) == own_imports(MODULES["errors"]) == set()


def test_the_package_imports_nothing_that_only_a_checkout_has() -> None:
    folders = ("benchmarks", "scripts", "tests")
    users = [
        name for name in NAMES for used in imports(MODULES[name]) for each in folders if is_in(used, each)
    ]
    assert users == []


@pytest.mark.parametrize("module", [name for name in NAMES if is_in(name, "engines")])
def test_embedded_engine_imports_no_client(module: str) -> None:
    known = own_imports(MODULES[module])
    assert [name for name in known for other in NOT_FOR_EMBEDDED if is_in(name, other)] == []


def test_only_the_runtime_and_the_publishers_import_dynamo() -> None:
    users = [name for name in NAMES for used in imports(MODULES[name]) if is_in(used, "dynamo")]
    assert [name for name in users if not any(is_in(name, allowed) for allowed in DYNAMO)] == []
    assert set(users) >= {"dynamo_runtime.worker_endpoint"}


def test_only_the_engine_asks_for_tensorrt_llm() -> None:
    users = {name for name in NAMES for used in imports(MODULES[name]) if used.startswith("tensorrt_llm")}
    assert users == set(TENSORRT_LLM)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("engines.embedded", "torch transformers dynamo numpy"),
        ("engines.modelled.build", "torch transformers dynamo"),
        ("engine.engine", "torch transformers dynamo tensorrt_llm"),
        ("handlers.services", "torch transformers dynamo tensorrt_llm"),
        ("engines.demo_model", "torch transformers tokenizers"),
        ("engines.demo_model.building", "torch transformers tokenizers"),
        ("tools.demo.both_orders", "torch transformers tokenizers"),
        ("tools.plan.comparison", "torch transformers"),
        ("strategies", "torch transformers dynamo tensorrt_llm msgspec pydantic yaml trtllm_disagg.handlers"),
        ("common.cli", "torch transformers dynamo pydantic msgspec yaml"),
    ],
)
def test_a_cheap_import_loads_no_heavy_library(module: str, heavy: str) -> None:
    name = f"{PACKAGE}.{module}"
    program = f"import sys, {name}; print(*[name for name in {heavy.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
