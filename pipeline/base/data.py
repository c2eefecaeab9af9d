"""Read the YAML tables in the folders of the modules that use them.

>>> list(load_table(__file__, "schemes.yaml"))[:2]
['ptpc_fp8', 'fp8']
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from quantmint.eval.records import SAFE_LOADER

T = TypeVar("T")


@cache
def load_table(module: str, name: str) -> Any:
    """Return the content of the YAML file ``name`` in the folder of ``module``, a ``__file__``.

    Each file is read once and its content shared: do not change it.
    """
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, SAFE_LOADER)  # noqa: S506 - it is safe


def rows(kind: type[T], table: Mapping[str, Mapping[str, Any]], *pairs: str) -> Mapping[str, T]:
    """Return the rows of ``table`` by name, in order, as dataclasses of ``kind`` with a field ``name``.

    ``pairs`` are fields that the table has as mappings and a row, to be hashable, as tuples of pairs. Raises pydantic's
    `ValidationError` for a row that does not fit.
    """
    from pydantic import TypeAdapter

    read = TypeAdapter(kind).validate_python
    paired = {name: {key: tuple(row.get(key, {}).items()) for key in pairs} for name, row in table.items()}
    return MappingProxyType({name: read({"name": name, **row, **paired[name]}) for name, row in table.items()})
