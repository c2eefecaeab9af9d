"""What the options of `quantmint serve` mean, as text on a command line.

>>> overrides_of(["max-num-seqs=256", "VLLM_ROCM_USE_AITER=0", "--enforce-eager"])
{'--max-num-seqs': '256', 'VLLM_ROCM_USE_AITER': '0', '--enforce-eager': True}
>>> speculation_of("eagle3:/models/draft:2")
Speculative(method='eagle3', model='/models/draft', tokens=2)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import UserError
from pipeline.recipe.faults import nearest
from pipeline.recipe.schema import Speculative
from pipeline.serving.knobs.table import table

_VERSION = re.compile(r"v?\d+\.\d+(\.\d+)?([.+a-z]\S*)?")
#: vLLM's own words for the fields of a recipe.
_VLLM_KEYS = {"num_speculative_tokens": "tokens"}


def overrides_of(texts: Iterable[str]) -> dict[str, str | bool]:
    """``NAME=VALUE`` each; without a value a flag is on, with ``NAME=false`` the knob is left out.

    The dashes of a flag may be left out. Raises `UserError`, with the nearest spelling, for what is no knob.
    """
    found: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        found[knob_name(name, "--set")] = True if not equals or value == "true" else value != "false" and value
    return found


def knob_name(name: str, where: str) -> str:
    """The table's spelling of a knob. Raises `UserError` for one that it does not have."""
    for spelling in (name, f"--{name.replace('_', '-')}"):
        if spelling in table():
            return spelling
    near = nearest(name, table()) or nearest(f"--{name}", table())
    raise UserError(
        f"{where}: found {name!r}, which is no knob of the table" + (f" (did you mean {near!r}?)" if near else "")
    )


def speculation_of(text: str) -> Speculative:
    """``METHOD[:MODEL]:TOKENS``, or vLLM's JSON object. Raises `UserError`."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise UserError(f"--speculative: found {text!r}, expected a JSON object ({error})") from None
        data: Mapping[str, Any] = {_VLLM_KEYS.get(name, name): value for name, value in given.items()}
    else:
        method, *model, tokens = text.split(":") if ":" in text else (text, "2")
        data = {
            "method": method,
            "model": ":".join(model) or None,
            "tokens": int(tokens) if tokens.isdigit() else tokens,
        }
    try:
        return Speculative.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"--speculative: {field}: {first['msg'].lower()}",
            hint="METHOD[:MODEL]:TOKENS, such as eagle3:/models/draft:2",
        ) from None


def version_of(text: str | None) -> str | None:
    """The version of vLLM that ``--vllm`` names; None where it names a command or an environment."""
    if text is None or Path(text).exists() or not _VERSION.fullmatch(text):
        return None
    return text.removeprefix("v")
