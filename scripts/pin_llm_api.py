"""Records TensorRT-LLM's LLM API as data: names, parameters, annotations, defaults, exceptions.

    python -m scripts.pin_llm_api SOURCE_TREE --version 1.3.0rc29 --source tensorrt_llm=COMMIT

Reads files of a source tree, which we do not keep, without importing them, and writes
trtllm_disagg/engine/pins/VERSION.json. Skips files that the tree lacks.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "trtllm_disagg" / "engine" / "pins"

#: Class -> its file and name, then those of its base classes.
CLASSES = {
    "LLM": (("llmapi/llm.py", "BaseLLM"),),
    "LlmArgs": (("llmapi/llm_args.py", "TorchLlmArgs"), ("llmapi/llm_args.py", "BaseLlmArgs")),
    "KvCacheConfig": (("llmapi/llm_args.py", "KvCacheConfig"),),
    "KVEventsConfig": (("llmapi/llm_args.py", "KVEventsConfig"),),
    "BlockReuseConfig": (("llmapi/llm_args.py", "BlockReuseConfig"),),
    "SchedulerConfig": (("llmapi/llm_args.py", "SchedulerConfig"),),
    "DynamicBatchConfig": (("llmapi/llm_args.py", "DynamicBatchConfig"),),
    "CacheTransceiverConfig": (("llmapi/llm_args.py", "CacheTransceiverConfig"),),
    "DecodeCudaGraphConfig": (
        ("llmapi/llm_args.py", "DecodeCudaGraphConfig"),
        ("llmapi/llm_args.py", "BaseCudaGraphConfig"),
    ),
    "EncodeCudaGraphConfig": (
        ("llmapi/llm_args.py", "EncodeCudaGraphConfig"),
        ("llmapi/llm_args.py", "BaseCudaGraphConfig"),
    ),
    "MoeConfig": (("llmapi/llm_args.py", "MoeConfig"),),
    "AttentionDpConfig": (("llmapi/llm_args.py", "AttentionDpConfig"),),
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
#: Enums and aliases in their annotations.
TYPES = {
    "CapacitySchedulerPolicy": "llmapi/llm_args.py",
    "ContextChunkingPolicy": "llmapi/llm_args.py",
    "CudaGraphConfigType": "llmapi/llm_args.py",
    "LoadFormat": "llmapi/llm_args.py",
    "PrefillCudaGraphBackend": "llmapi/llm_args.py",
    "WaitingQueuePolicy": "llmapi/llm_args.py",
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
    """The pin as JSON, one parameter per line: [annotation, default]."""
    text = r'("(?:[^"\\]|\\.)*"|null)'
    return re.sub(rf"\[\n\s+{text},\n\s+{text}\n\s+\]", r"[\1, \2]", json.dumps(pin, indent=1)) + "\n"


def read_api(package: Path) -> dict[str, Any]:
    """Raises FileNotFoundError if none of the files exists."""
    trees = _Trees(package)
    classes = {name: made for name, parts in CLASSES.items() if (made := _class(trees, parts))}
    functions = {}
    for name, file in FUNCTIONS.items():
        tree = trees.of(file)
        # null: the file lacks the function.
        found = None if tree is None else _find(tree, name, ast.FunctionDef)
        if tree is not None:
            functions[name] = None if found is None else _parameters(found)
    if not classes and not functions:
        raise FileNotFoundError(f"{package} has none of TensorRT-LLM's files")
    types = {name: text for name, file in TYPES.items() if (text := _type(trees.of(file), name))}
    return {"classes": classes, "types": types, "functions": functions}


#: (annotation, default) as written. No default: required.
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
    """Fields, methods and attributes of a class, where its own override inherited ones."""
    made: dict[str, Any] = {}
    for file, name in reversed(parts):
        tree = trees.of(file)
        node = None if tree is None else _find(tree, name, ast.ClassDef)
        if node is None:
            continue
        made["bases"] = [ast.unparse(base) for base in node.bases]
        for kind, facts in (
            ("fields", _fields(node)),
            ("limits", _limits(node)),
            ("methods", _methods(node)),
        ):
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


#: Keywords of a Field that limit its value.
_LIMITS = ("gt", "ge", "lt", "le", "min_length", "max_length")


def _limits(node: ast.ClassDef) -> dict[str, dict[str, Any]]:
    """Field -> its limits, for fields that declare any."""
    found = {
        item.target.id: {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in item.value.keywords
            if keyword.arg in _LIMITS
        }
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(item.value, ast.Call)
    }
    return {name: limits for name, limits in found.items() if limits}


def _type(tree: ast.Module | None, name: str) -> str | None:
    """An enum as a Literal of its values, after its names if those are numbers; an alias as written."""
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            members = [item for item in node.body if isinstance(item, ast.Assign)]
            values = [ast.literal_eval(item.value) for item in members]
            names = [ast.unparse(item.targets[0]) for item in members]
            return f"Literal{values if isinstance(values[0], str) else names + values}"
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            is_annotated = (
                isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) == "Annotated"
            )
            alias = node.value.slice.elts[0] if is_annotated else node.value  # type: ignore[attr-defined]
            return ast.unparse(alias)
    return None


def _methods(node: ast.ClassDef) -> dict[str, dict[str, Any]]:
    return {
        item.name: _parameters(item)
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(item)
        if not item.name.startswith("_") or item.name in ("__init__", "_check_health")
    }


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Properties, and attributes set in __init__."""
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
    """The default as source text, also inside a pydantic Field or dataclass field. None: required."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Field", "field", "PrivateAttr"):
        given = {item.arg: item.value for item in node.keywords}
        if "default_factory" in given:
            return f"{ast.unparse(given['default_factory'])}()"
        return _text(given.get("default") or next(iter(node.args), None))
    return _text(node)


if __name__ == "__main__":
    main()
