"""A measurement on disk: two files, safetensors and JSON, from which another process goes on as if it were its own.

::

    keep(measurement, folder / "00007")
    merged([recall(folder / "00007", observation), ...]).finish()

What is kept are the summaries and not the magnitudes that follow from them: parts of the batches can be joined by
nothing less, but for the largest magnitude. A histogram has 32,768 bins of which a few thousand are not empty, and only
those are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.durable import sync
from calibration.errors import CalibrationError
from calibration.measurement import Measurement
from calibration.observers import Observation, Summary

if TYPE_CHECKING:
    import torch


def keep(measurement: Measurement, stem: Path) -> None:
    """Write ``STEM.safetensors`` and, last, ``STEM.json``, both of which are on the disk for good then.

    Raises `CalibrationError` where they cannot be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[int, str] = {}  # modules with one input have one summary

    def entries(table: Mapping[Any, Summary]) -> list[list[str]]:
        found = []
        for (kind, name), summary in table.items():
            number = numbers.setdefault(id(summary), str(len(numbers)))
            if f"{number}.total" not in tensors and f"{number}.at" not in tensors:
                tensors.update(_packed(number, summary.total.cpu()))
            found.append([kind, name, number, str(summary.dtype).removeprefix("torch.")])
        return found

    facts = {
        "summaries": entries(measurement.summaries),
        "every": entries(measurement.every),
        "order": [list(key) for key in measurement.order],
        "expert_of": [[*key, expert] for key, expert in measurement.expert_of.items()],
        "tokens": measurement.tokens,
        "routed_only": sorted(measurement.routed_only),
    }
    with _kept(stem):
        stem.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, stem.with_suffix(".safetensors"))
        sync(stem.with_suffix(".safetensors"))
        partial = stem.with_suffix(".partial")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        sync(partial)
        partial.replace(stem.with_suffix(".json"))
        sync(stem.parent)


def recall(stem: Path, observation: Observation) -> Measurement:
    """Read what `keep` wrote; ``observation`` is what it was measured with.

    Raises `CalibrationError` for files that are not there or hold anything else.
    """
    import torch
    from safetensors.torch import load_file

    found = Measurement(observation)
    with _kept(stem):
        facts: dict[str, Any] = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        stored = load_file(stem.with_suffix(".safetensors"))
        for table, entries in ((found.summaries, facts["summaries"]), (found.every, facts["every"])):
            for kind, name, number, dtype in entries:
                table[kind, name] = Summary(_unpacked(number, stored), getattr(torch, dtype))
        found.order.update(((kind, name), None) for kind, name in facts["order"])
        found.expert_of.update(((kind, name), expert) for kind, name, expert in facts["expert_of"])
        found.tokens.update(facts["tokens"])
        found.routed_only.update(facts["routed_only"])
    return found


def _packed(number: str, total: torch.Tensor) -> dict[str, torch.Tensor]:
    import torch

    if total.is_floating_point():
        return {f"{number}.total": total.clone()}
    flat = total.flatten()
    seen = flat.nonzero().squeeze(1)
    return {
        f"{number}.at": seen,
        f"{number}.count": flat[seen],
        f"{number}.shape": torch.tensor(total.shape, dtype=torch.int64),
    }


def _unpacked(number: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    import torch

    if f"{number}.total" in stored:
        return stored[f"{number}.total"]
    whole = torch.zeros(stored[f"{number}.shape"].tolist(), dtype=torch.int64)
    whole.view(-1)[stored[f"{number}.at"]] = stored[f"{number}.count"]
    return whole


@contextmanager
def _kept(stem: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"{stem}: the measurement cannot be kept there: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{stem}: no measurement of this version: {error!r}") from error
