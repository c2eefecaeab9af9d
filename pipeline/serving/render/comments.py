"""What manifests share: YAML that reads like one written by hand, and the plan's reasons as comments at its top."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from pipeline.serving.plan import LaunchPlan
from pipeline.serving.render.invocation import title

_WIDTH = 116


class Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice: readers of a manifest follow no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Every value is written where it stands."""
        return True


# Text that Kubernetes' reader takes for a truth or a number, and PyYAML does not: y, 5e8, 0o17.
_BOOL, _NUMBER = re.compile(r"[yYnN]"), re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+|[-+]?0o[0-7_]+")
for _tag, _pattern, _first in (("bool", _BOOL, "yYnN"), ("float", _NUMBER, "-+.0123456789")):
    Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), list(_first))


def dump(*documents: Mapping[str, Any]) -> str:
    """The documents as YAML, keys in the order that they have."""
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)


def comments(plan: LaunchPlan) -> str:
    """Lines that begin with ``#``, each ended by a newline."""
    lines = [title(plan), "made by `quantmint serve`; make it again rather than edit it: the knobs belong together", ""]
    lines += [line for warning in plan.warnings for line in _wrapped(f"warning: {warning}")]
    lines += [line for reason in plan.reasons for line in _wrapped(f"{reason.knob}: {reason.why} [{reason.source}]")]
    lines += [line for check in plan.host for line in _wrapped(f"host: {check.name} {check.expected}: {check.why}")]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
