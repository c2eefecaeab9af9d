"""What a library is asked to do, as a file: the whole of what the process that imports it is told.

    job.save(path); LibraryJob.load(path) == job

Calibration samples lie beside it in one safetensors file, so that the library sees the very tokens that our own
calibration would: ``tokens`` int64 [total] and ``lengths`` int64 [samples].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.formats.layout import Choice
from pipeline.model.structure import Structure
from pipeline.recipe.schema import Quantization
from pipeline.store.disk import sha256_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LibraryJob:
    """One checkpoint to make. Modules have the names of transformers' model, which are all that a library knows.

    ``schemes`` maps every linear module that is quantized to its scheme; all others stay as they are. ``output`` is a
    folder that is not there yet. ``samples`` is None where nothing is calibrated, ``samples_sha256`` is of its file.
    """

    source: str
    output: str
    schemes: Mapping[str, str]
    kv_cache: bool
    algorithm: str
    parameters: Mapping[str, float | int | bool]
    samples: str | None
    samples_sha256: str | None
    batch_size: int
    device: str
    trust_remote_code: bool

    @property
    def default(self) -> str:
        """The scheme of the most modules; the first by name where two are as frequent."""
        names = list(self.schemes.values())
        return max(sorted(set(names)), key=names.count)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LibraryJob:
        """Read what `save` wrote."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**values)


def job_of(
    source: Path,
    output: Path,
    choice: Choice,
    structure: Structure,
    quantization: Quantization,
    *,
    samples: Path | None,
    batch_size: int,
    device: str,
    trust_remote_code: bool,
) -> LibraryJob:
    """The job that a choice of schemes leads to."""
    return LibraryJob(
        source=str(source),
        output=str(output),
        schemes={structure.modules[module]: scheme for module, scheme in choice.schemes.items()},
        kv_cache=choice.kv_cache,
        algorithm=quantization.algorithm,
        parameters=quantization.parameters,
        samples=None if samples is None else str(samples),
        samples_sha256=None if samples is None else sha256_of(samples),
        batch_size=batch_size,
        device=device,
        trust_remote_code=trust_remote_code,
    )


def save_samples(samples: Sequence[torch.Tensor], path: Path) -> None:
    """Write samples of int64 [n] each."""
    import torch
    from safetensors.torch import save_file

    lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int64)
    save_file({"tokens": torch.cat(list(samples)), "lengths": lengths}, path)


def load_batches(job: LibraryJob) -> Iterator[torch.Tensor]:
    """The job's samples as int64 [batch, n], each batch of one length.

    Raises `ValueError` where the file is not the one that the job was written for.
    """
    from safetensors.torch import load_file

    from calibration.batches import batched

    if job.samples is None:
        return
    path = Path(job.samples)
    if sha256_of(path) != job.samples_sha256:
        raise ValueError(f"{path} is not the file of samples that the job was written for")
    stored = load_file(path)
    yield from batched(stored["tokens"].split(stored["lengths"].tolist()), job.batch_size)
