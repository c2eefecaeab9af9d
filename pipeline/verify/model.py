"""The checkpoint of a release by its headers, with the modules that its configuration stands for."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.formats.checkpoint import INDEX_NAME, open_checkpoint
from pipeline.verify.reading import LARGEST, UnreadableError

if TYPE_CHECKING:
    from pipeline.formats.checkpoint import Checkpoint
    from pipeline.model.structure import Structure
    from pipeline.verify.subject import Subject

_HEADERS = 1 << 27  # bytes of all headers; those of DeepSeek-R1 in FP8 take twelve million
_COUNTS = ("layers", "experts")
_MODULES = 10_000  # that a model may have beside eight for each tensor; of a Llama every second one has a weight


class _EndlessError(Exception):
    """A configuration asks for more modules than the checkpoint could fill."""


class UnknownModelError(UserError):
    """What is installed here cannot build the model: nothing is said of the checkpoint."""


def read(subject: Subject) -> tuple[Checkpoint, Structure]:
    """Open the checkpoint and build its model without weights; code of the repository is never run.

    Raises `UserError` for a checkpoint that contradicts itself, and `UnknownModelError` where the model cannot be
    built here.
    """
    from pipeline.model.meta import meta_model
    from pipeline.model.structure import read_structure

    config = subject.object("config.json")
    _bound(subject, config)
    checkpoint = open_checkpoint(subject.folder)
    for name, count in _counts(config):
        if count > max(len(checkpoint.tensors), 1):
            raise UserError(
                f"config.json says {name} {count:,}, the checkpoint has {len(checkpoint.tensors):,} tensors in all"
            )
    most = _MODULES + 8 * len(checkpoint.tensors)
    try:
        with _at_most(most):
            return checkpoint, read_structure(subject.folder, checkpoint.tensors)
    except _EndlessError:
        raise UserError(
            f"config.json asks for more than {most:,} modules, the checkpoint has {len(checkpoint.tensors):,} tensors "
            "in all"
        ) from None
    except UserError:
        try:
            meta_model(subject.folder)
        except UserError as error:
            raise UnknownModelError(error.message) from None
        raise


@contextmanager
def _at_most(most: int) -> Iterator[None]:
    """Stop building after so many modules: configurations count them by more names than anybody knows."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise _EndlessError

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _bound(subject: Subject, config: Mapping[str, Any]) -> None:
    """Refuse what would be read without end before it is parsed."""
    if subject.listing.files.get(INDEX_NAME, 0) > LARGEST:
        raise UnreadableError(f"{INDEX_NAME} is larger than {LARGEST:,} bytes")
    total = 0
    for name in subject.listing.files:
        if name.endswith(".safetensors"):
            with (subject.folder / name).open("rb") as stream:
                head = stream.read(8)
            total += struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if total > _HEADERS:
            raise UnreadableError(f"the headers of the safetensors files take more than {_HEADERS:,} bytes")


def _counts(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Numbers of layers and experts anywhere in a configuration: a model is built with as many modules."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _counts(entry, str(key))
    elif isinstance(value, int) and any(word in name for word in _COUNTS):
        yield name, value
