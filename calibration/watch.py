"""Hooks on all linear modules and experts of a model, or of a part of it, for as long as it is measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from calibration.experts import is_listed, is_stacked, watch_listed, watch_stacked
from calibration.measurement import Measurement

_EXPERT = re.compile(r"((?:.+\.)?experts\.\d+)\..+")


@contextmanager
def watching(model: Any, part: str, measurement: Measurement) -> Iterator[None]:
    """Measure the inputs of every linear module below ``part`` ("" for all) but the output head."""
    handles = list(_hooks(model, part, measurement))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(model: Any, part: str, measurement: Measurement) -> Iterator[Any]:
    import torch

    head = model.get_output_embeddings()
    lists = {f"{part}.{inner}" if part else inner for inner, m in _below(model, part) if is_listed(inner, m)}
    for inner, module in _below(model, part):
        name = f"{part}.{inner}" if part and inner else part or inner
        if isinstance(module, torch.nn.Linear) and module is not head:
            expert = _EXPERT.fullmatch(name)
            known = expert[1] if expert and expert[1].rpartition(".")[0] in lists else None
            yield module.register_forward_pre_hook(_input_hook(measurement, name, known), with_kwargs=True)
        elif name in lists:
            block = model.get_submodule(name.rpartition(".")[0])
            yield from watch_listed(name, module, block, measurement)
        elif is_stacked(module):
            yield from watch_stacked(name, module, measurement)


def _below(model: Any, part: str) -> Iterator[tuple[str, Any]]:
    yield from (model.get_submodule(part) if part else model).named_modules()


def _input_hook(measurement: Measurement, name: str, expert: str | None) -> Callable[..., None]:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        measurement.input(name, args[0] if args else kwargs["input"], expert=expert)

    return hook
