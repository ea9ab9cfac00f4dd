"""Writes down TensorRT-LLM's LLM API as data: names, parameters, annotations, defaults, exceptions.

    python -m tools.pin_llm_api SOURCE_TREE --version 1.3.0rc29 --source tensorrt_llm=COMMIT

reads files of a TensorRT-LLM source tree (which is not ours to keep) without importing them, and writes
trtllm_disagg/engines/recording/llm_api/VERSION.json: facts only, no code. Files that the tree lacks are skipped.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "trtllm_disagg" / "engines" / "recording" / "llm_api"

#: The file and name of each class, followed by those of its base classes.
CLASSES = {
    "LLM": (("llmapi/llm.py", "BaseLLM"),),
    "LlmArgs": (("llmapi/llm_args.py", "TorchLlmArgs"), ("llmapi/llm_args.py", "BaseLlmArgs")),
    "KvCacheConfig": (("llmapi/llm_args.py", "KvCacheConfig"),),
    "KVEventsConfig": (("llmapi/llm_args.py", "KVEventsConfig"),),
    "BlockReuseConfig": (("llmapi/llm_args.py", "BlockReuseConfig"),),
    "SchedulerConfig": (("llmapi/llm_args.py", "SchedulerConfig"),),
    "DynamicBatchConfig": (("llmapi/llm_args.py", "DynamicBatchConfig"),),
    "CacheTransceiverConfig": (("llmapi/llm_args.py", "CacheTransceiverConfig"),),
    "SamplingParams": (("sampling_params.py", "SamplingParams"),),
    "GuidedDecodingParams": (("sampling_params.py", "GuidedDecodingParams"),),
    "DisaggregatedParams": (("disaggregated_params.py", "DisaggregatedParams"),),
    "CompletionOutput": (("executor/result.py", "CompletionOutput"),),
    "RequestOutput": (
        ("executor/result.py", "GenerationResult"),
        ("executor/result.py", "GenerationResultBase"),
    ),
    "RequestError": (("executor/utils.py", "RequestError"),),
}
FUNCTIONS = {"get_global_disagg_request_id": "llmapi/disagg_utils.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=Path, help="a folder that has tensorrt_llm/ in it")
    parser.add_argument("--version", required=True, help="names the file that is written")
    parser.add_argument("--source", action="append", default=[], metavar="FILE=COMMIT", required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    source = dict(item.split("=", 1) for item in options.source)
    pin = {"version": options.version, "source": source} | read_api(options.tree / "tensorrt_llm")
    path = options.out / f"{options.version}.json"
    path.write_text(_written(pin))
    print(path)


def _written(pin: dict[str, Any]) -> str:
    """The pin as JSON, with each parameter in one line: [annotation, default]."""
    text = r'("(?:[^"\\]|\\.)*"|null)'
    return re.sub(rf"\[\n\s+{text},\n\s+{text}\n\s+\]", r"[\1, \2]", json.dumps(pin, indent=1)) + "\n"


def read_api(package: Path) -> dict[str, Any]:
    """Raises FileNotFoundError if none of the files exists."""
    trees = _Trees(package)
    classes = {name: made for name, parts in CLASSES.items() if (made := _class(trees, parts))}
    functions = {}
    for name, file in FUNCTIONS.items():
        tree = trees.of(file)
        # A function that the file lacks is recorded as null.
        found = None if tree is None else _find(tree, name, ast.FunctionDef)
        if tree is not None:
            functions[name] = None if found is None else _parameters(found)
    if not classes and not functions:
        raise FileNotFoundError(f"{package} has none of TensorRT-LLM's files")
    return {"classes": classes, "functions": functions}


#: (annotation, default), as they are written. No default: it has to be given.
Fact = tuple[str | None, str | None]


class _Trees:
    def __init__(self, package: Path) -> None:
        self._package = package
        self._parsed: dict[str, ast.Module | None] = {}

    def of(self, file: str) -> ast.Module | None:
        if file not in self._parsed:
            path = self._package / file
            self._parsed[file] = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None
        return self._parsed[file]


def _class(trees: _Trees, parts: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Fields, methods and attributes of a class; its own override inherited ones."""
    made: dict[str, Any] = {}
    for file, name in reversed(parts):
        tree = trees.of(file)
        node = None if tree is None else _find(tree, name, ast.ClassDef)
        if node is None:
            continue
        made["bases"] = [ast.unparse(base) for base in node.bases]
        for kind, facts in (("fields", _fields(node)), ("methods", _methods(node))):
            made[kind] = made.get(kind, {}) | facts
        made["attributes"] = sorted({*made.get("attributes", ()), *_attributes(node)})
        made["raises"] = sorted({*made.get("raises", ()), *_raises(node)})
    return made


def _find(tree: ast.Module, name: str, kind: type[ast.AST]) -> Any:
    return next(
        (node for node in tree.body if isinstance(node, kind) and getattr(node, "name", "") == name), None
    )


def _fields(node: ast.ClassDef) -> dict[str, Fact]:
    return {
        item.target.id: (_text(item.annotation), _default(item.value))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if not item.target.id.startswith("_")
    }


def _methods(node: ast.ClassDef) -> dict[str, dict[str, Any]]:
    return {
        item.name: _parameters(item)
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(item)
        if not item.name.startswith("_") or item.name in ("__init__", "_check_health")
    }


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Properties, and the attributes that __init__ sets."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and _is_property(item) and not item.name.startswith("_"):
            yield item.name
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            yield from (
                target.attr
                for target in ast.walk(item)
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                if ast.unparse(target.value) == "self" and not target.attr.startswith("_")
            )


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _raises(node: ast.ClassDef) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Raise) and isinstance(item.exc, ast.Call):
            yield ast.unparse(item.exc.func)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Fact]:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [
        _default(value) for value in given.defaults
    ]
    named = [*zip(positional, defaults, strict=True)]
    named += [
        (item, _default(value)) for item, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters = {
        item.arg: (_text(item.annotation), default) for item, default in named if item.arg != "self"
    }
    if given.kwarg is not None:
        parameters["**" + given.kwarg.arg] = (_text(given.kwarg.annotation), None)
    return parameters


def _text(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


def _default(node: ast.expr | None) -> str | None:
    """The default as source text, also that in a pydantic Field or dataclass field. None: the value is required."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Field", "field", "PrivateAttr"):
        given = {item.arg: item.value for item in node.keywords}
        if "default_factory" in given:
            return f"{ast.unparse(given['default_factory'])}()"
        return _text(given.get("default") or next(iter(node.args), None))
    return _text(node)


if __name__ == "__main__":
    main()
