"""The folder in which amd-quark compiles its extension, when it is imported for the first time.

PyTorch marks a folder that it compiles in with a file. A process that is killed meanwhile leaves the file behind, and
every later import waits for it without end. Our processes compile in a folder of their own, one after the other, so
that whoever is next knows that a mark there is nobody's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_VARIABLE = "TORCH_EXTENSIONS_DIR"
_FOLDER = "quantmint"


def extensions_folder() -> Path:
    """Return the folder for this PyTorch: in TORCH_EXTENSIONS_DIR where that is set, else beside PyTorch's own."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get(_VARIABLE) or get_default_build_root())
    return root if root.parent.name == _FOLDER else root / _FOLDER / f"torch-{torch.__version__}"


@contextmanager
def extensions_compiled_alone() -> Iterator[None]:
    """Within the block, let no other process of ours compile; remove what a killed one has left to wait for.

    Afterwards this process, and what it starts, still finds there what was compiled. Raises `OSError` for a folder that
    cannot be written to.
    """
    folder = extensions_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "process.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        for mark in folder.glob("*/lock"):
            with suppress(FileNotFoundError):
                mark.unlink()
        os.environ[_VARIABLE] = str(folder)
        yield
