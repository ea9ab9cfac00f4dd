"""Records the fields of a CustomResourceDefinition that our manifests use: names, types, what is required.

    trtllm-disagg k8s ... | python -m tools.pin_crd CRD.yaml --version v1beta1 --source REPOSITORY@COMMIT

reads a CRD (which is not ours to keep) and writes tests/unit/k8s/crds/KIND.json: a schema without descriptions, and
without fields that no manifest has. The tool fails if a manifest has a field that the CRD lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parents[1] / "tests" / "unit" / "k8s" / "crds"

#: The keys of JSON Schema that restrict a value.
_FACTS = (
    "type",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "required",
    "anyOf",
    "additionalProperties",
)

Schema = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("crd", type=Path)
    parser.add_argument("--version", required=True)
    parser.add_argument("--source", required=True, metavar="REPOSITORY@COMMIT")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    crd = yaml.load(options.crd.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    kind = crd["spec"]["names"]["kind"]
    manifests = [each for each in yaml.safe_load_all(sys.stdin) if each["kind"] == kind]
    versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"]}
    pin = {
        "apiVersion": f"{crd['spec']['group']}/{options.version}",
        "source": options.source,
        "schema": pinned(versions[options.version], manifests, kind),
    }
    path = options.out / f"{kind}.json"
    path.write_text(json.dumps(pin, indent=1) + "\n")
    print(path)


def pinned(schema: Mapping[str, Any], values: Iterable[Any], path: str) -> Schema:
    """`schema` reduced to the fields that `values` have. Raises SystemExit for a field that the schema lacks."""
    values = list(values)
    facts = {name: schema[name] for name in _FACTS if name in schema}
    if "items" in schema:
        items = [item for value in values for item in value]
        facts["items"] = pinned(schema["items"], items, f"{path}[]")
    if "properties" in schema:
        used = dict.fromkeys([*facts.get("required", ()), *(name for value in values for name in value)])
        if missing := used.keys() - schema["properties"].keys():
            raise SystemExit(f"{path}: no such field: {', '.join(sorted(missing))}")
        facts["properties"] = {
            name: pinned(
                schema["properties"][name], [each[name] for each in values if name in each], f"{path}.{name}"
            )
            for name in used
        }
        facts["additionalProperties"] = False
    return facts


if __name__ == "__main__":
    main()
