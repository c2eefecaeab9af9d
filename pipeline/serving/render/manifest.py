"""YAML text for readers other than PyYAML: docker compose, Kubernetes, GitHub Actions; and the comments at its top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.render.invocation import title


class _ManifestDumper(yaml.SafeDumper):
    """Writes repeated values out instead of using anchors, which readers of manifests do not follow."""

    def ignore_aliases(self, data: object) -> bool:
        return True


# Quote text that Kubernetes' YAML reader takes for a boolean or a number and PyYAML does not: y, 5e8, 0o17.
_BOOL, _NUMBER = re.compile(r"[yYnN]"), re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+|[-+]?0o[0-7_]+")
for _tag, _pattern, _first in (("bool", _BOOL, "yYnN"), ("float", _NUMBER, "-+.0123456789")):
    _ManifestDumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), list(_first)
    )


def dump(*documents: Mapping[str, Any]) -> str:
    """Return the documents as YAML, with keys in their own order."""
    return yaml.dump_all(documents, Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=1000)


def comments(plan: LaunchPlan) -> str:
    """Return the title and warnings of a plan as comment lines, each starting with ``#`` and ending with a newline."""
    lines = [title(plan), "made by `quantmint serve`; make it again rather than edit it: the knobs belong together"]
    return "".join(f"# {line}\n" for line in (*lines, *(f"warning: {warning}" for warning in plan.warnings)))
