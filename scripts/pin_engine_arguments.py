"""Records the TensorRT-LLM engine arguments in Dynamo's examples, recipes and tests, with their values.

    python -m scripts.pin_engine_arguments TREE --source REPOSITORY@COMMIT

Reads a source tree, which we do not keep, and writes tests/unit/config/dynamos_engine_arguments.json: dotted key -> all
its values. Counts each file or ConfigMap that is a mapping with two arguments of LlmArgs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs

OUT = Path(__file__).parents[1] / "tests" / "unit" / "config" / "dynamos_engine_arguments.json"
FOLDERS = ("examples", "recipes", "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--source", required=True, metavar="REPOSITORY@COMMIT")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    files = [content for folder in FOLDERS for content in engine_files(options.tree / folder)]
    values: dict[str, list[Any]] = {}
    for content in files:
        for key, value in leaves(content):
            seen = values.setdefault(key, [])
            if value not in seen:
                seen.append(value)
    pin = {"source": options.source, "files": len(files), "values": dict(sorted(values.items()))}
    options.out.write_text(json.dumps(pin, indent=1) + "\n")
    print(f"{options.out}: {len(files)} files, {len(values)} keys")


def engine_files(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.rglob("*.yaml")):
        try:
            documents = list(yaml.safe_load_all(path.read_text()))
        except yaml.YAMLError:  # a template
            continue
        for document in documents:
            yield from filter(_is_engine_file, (document, *_config_map(document)))


def _config_map(document: Any) -> Iterator[Any]:
    if isinstance(document, dict) and document.get("kind") == "ConfigMap":
        for name, text in (document.get("data") or {}).items():
            if name.endswith(".yaml"):
                yield yaml.safe_load(text)


def _is_engine_file(content: Any) -> bool:
    return isinstance(content, dict) and len(LlmArgs.model_fields.keys() & content.keys()) >= 2


def leaves(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


if __name__ == "__main__":
    main()
