"""Records which fields of a CustomResourceDefinition deploy/k8s/ uses: names, types, and what is required.

kubectl kustomize deploy/k8s/deepseek-r1 | python -m scripts.pin_crd CRD.yaml v1beta1 REPOSITORY@COMMIT

Reads a CRD, which we do not keep, and writes tests/unit/deploy/crds/KIND.json: a schema without descriptions and
without unused fields. Fails if a manifest has a field that the CRD lacks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parents[1] / "tests" / "unit" / "deploy" / "crds"

#: JSON Schema keys that restrict a value.
_FACTS = "type enum pattern minimum maximum minLength maxLength minItems maxItems required anyOf additionalProperties"

Schema = dict[str, Any]


def main(file: str, version: str, source: str) -> None:
    crd = yaml.load(Path(file).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    kind = crd["spec"]["names"]["kind"]
    manifests = [each for each in yaml.safe_load_all(sys.stdin) if each["kind"] == kind]
    versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"]}
    schema = pinned(versions[version], manifests, kind)
    pin = {"apiVersion": f"{crd['spec']['group']}/{version}", "source": source, "schema": schema}
    (OUT / f"{kind}.json").write_text(json.dumps(pin, indent=1) + "\n")


def pinned(schema: Mapping[str, Any], values: Iterable[Any], path: str) -> Schema:
    """Reduces `schema` to the fields in `values`. Raises SystemExit for a field that it lacks."""
    values = list(values)
    facts = {name: schema[name] for name in _FACTS.split() if name in schema}
    if "items" in schema:
        facts["items"] = pinned(schema["items"], [item for value in values for item in value], f"{path}[]")
    if "properties" in schema:
        used = dict.fromkeys([*facts.get("required", ()), *(name for value in values for name in value)])
        if missing := used.keys() - schema["properties"].keys():
            raise SystemExit(f"{path}: no such field: {', '.join(sorted(missing))}")
        facts["additionalProperties"] = False
        facts["properties"] = {
            name: pinned(field, [each[name] for each in values if name in each], f"{path}.{name}")
            for name, field in schema["properties"].items()
            if name in used
        }
    return facts


if __name__ == "__main__":
    main(*sys.argv[1:])
