"""The container that all of this runs in, where it runs in one: by its digest, because a tag can mean another tomorrow.

    QUANTMINT_IMAGE=rocm/vllm@sha256:0b21...    # set by the manifest that starts the container

Nothing inside a container knows what it was started from. Another image is another server: what was measured with the
one says nothing of the other, though the checkpoint stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from pipeline.errors import UserError

VARIABLE: Final = "QUANTMINT_IMAGE"
_IMAGE: Final = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")


def serving_image(environ: Mapping[str, str] | None = None) -> str | None:
    """The image as ``name@sha256:DIGEST``; None outside a container. Raises `UserError` for anything else."""
    found = (os.environ if environ is None else environ).get(VARIABLE, "")
    if not found:
        return None
    if _IMAGE.fullmatch(found) is None:
        raise UserError(
            f"{VARIABLE}: found {found!r}, expected an image by its digest, name@sha256: and 64 hex digits",
            hint="`docker inspect --format '{{index .RepoDigests 0}}' IMAGE` prints it; unset it outside a container.",
        )
    return found
