"""A manifest as YAML."""

from __future__ import annotations

from typing import Any

import yaml

from trtllm_disagg.k8s.manifests import Manifest


class _Dumper(yaml.SafeDumper):
    """Files stay readable inside a manifest, and nothing in it refers to another place."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_of_lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_of_lines)


def yaml_text(made: Manifest) -> str:
    return yaml.dump(made, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=200)
