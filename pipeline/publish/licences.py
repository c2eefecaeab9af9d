"""What the licence of a base model asks of those who pass on a checkpoint that was made from it.

    >>> found = terms({"license": "llama3.3"}, ("LICENSE",), accepted=True)
    >>> found.name, found.prefix
    ('Llama 3.3 Community License Agreement', 'Llama')

The table is `licences.yaml`. It is a reading of the texts and no legal advice; what it does not know is not passed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Redistribution = Literal["yes", "conditions", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a base model.

    ``id`` is what the Hub reads under `license`; ``hub_name`` goes under `license_name` where that is "other".
    ``prefix`` is what the name of a derived model must begin with, ``notices`` the sentences that its card must show,
    ``conditions`` what else is asked of who passes it on, ``files`` the texts that lie beside the checkpoint.
    """

    id: str
    name: str
    link: str | None = None
    hub_name: str | None = None
    redistribution: Redistribution = "unknown"
    prefix: str | None = None
    notices: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    needs_text: bool = False
    accepted: bool = False
