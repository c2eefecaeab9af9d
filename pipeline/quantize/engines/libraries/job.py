"""The job of a library, as a file; the 16-bit model that it gets; and the memory that both take.

The file is the whole of what the process that imports the library is told. Calibration samples lie beside it in one
safetensors file, so that the library sees the very tokens that our own calibration would: ``tokens`` int64 [total] and
``lengths`` int64 [samples]. The model is resident, with attention step by step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantmint.calibration.batches import batched
from quantmint.calibration.lazy import torch
from quantmint.eval.report.numbers import size
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, tensor_bytes
from quantmint.pipeline.quantize.formats.choice import Choice, most_frequent
from quantmint.pipeline.quantize.formats.layout import layout, weight_tensors
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.structure import Structure


@dataclass(frozen=True, slots=True)
class LibraryJob:
    """One checkpoint for a library to make; modules have the names of transformers' model, which the library knows.

    ``schemes`` maps every linear module that is quantized to its scheme (`Structure.modules` has its name in the
    model); all others stay in 16 bit. ``source`` and ``output`` are folders; ``output`` must not exist. ``samples`` is
    a file of `save_samples`, None where nothing is calibrated.
    """

    source: str
    output: str
    schemes: Mapping[str, str]
    kv_cache: bool
    algorithm: str
    parameters: Mapping[str, float | int | bool]
    samples: str | None
    batch_size: int
    device: str
    trust_remote_code: bool

    @property
    def default(self) -> str:
        """Return the scheme of the most modules."""
        return most_frequent(self.schemes.values())

    def save(self, path: Path) -> None:
        """Write the job to a JSON file that `load` reads."""
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LibraryJob:
        """Read a job from the JSON file that `save` wrote."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**values)


def save_samples(samples: Sequence[torch.Tensor], path: Path) -> None:
    """Write samples, int64 token ids [n] each, to one safetensors file.

    It holds their concatenation ``tokens``, int64 [total], and ``lengths``, int64 [samples].
    """
    from safetensors.torch import save_file

    lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int64)
    save_file({"tokens": torch.cat(list(samples)), "lengths": lengths}, path)


def load_batches(job: LibraryJob) -> Iterator[torch.Tensor]:
    """Yield the job's samples in batches of equal length, int64 [batch, n]; nothing where the job has no samples."""
    from safetensors.torch import load_file

    if job.samples is None:
        return
    stored = load_file(job.samples)
    yield from batched(stored["tokens"].split(stored["lengths"].tolist()), job.batch_size)


class UnfitError(Exception):
    """Raised where a library cannot do a job with this model; the message is one line, shown without a traceback."""


def load_model(job: LibraryJob, device: str) -> Any:
    """Load the model of the job's source folder onto a device, safetensors only, in the dtype it is stored in.

    Attention is "eager": both libraries look at K and V there, and fused attention differs in the last bit.
    """
    kind = type(meta_model(Path(job.source), trust_remote_code=job.trust_remote_code))
    model = kind.from_pretrained(
        job.source, dtype="auto", attn_implementation="eager", use_safetensors=True, local_files_only=True
    )
    # Written under the model's own names: what transformers would rename on the way out it renames in part, once
    # experts were taken apart. `adopt` gives every tensor the name that it has in the source.
    model._weight_conversions = []
    return model.to(device).eval()


def linear_names(model: Any) -> tuple[str, ...]:
    """Return the names of all linear modules of a model, including those of experts that were taken apart."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))


def require_modules(model: Any, job: LibraryJob, library: str) -> None:
    """Raise `UnfitError` where a module that the job quantizes is no linear module of ``model``.

    ``library`` is the library's name, for the message.
    """
    missing = sorted(job.schemes.keys() - set(linear_names(model)))
    if missing:
        raise UnfitError(
            f"{library} has no linear module {missing[0]} in this model"
            + (f", nor {len(missing) - 1} others: it does not take its experts apart" if missing[1:] else "")
        )


def run_main(main: Callable[[LibraryJob], None]) -> None:
    """Call ``main`` with the job whose file the command line names; exit with status 1 and one line on `UnfitError`."""
    try:
        main(LibraryJob.load(Path(sys.argv[1])))
    except UnfitError as error:
        sys.exit(str(error))


#: Of the model's bytes: weights, one layer's activations and statistics, the first quantized copies.
_FACTOR = 1.2


def checkpoint_bytes(source: Checkpoint, structure: Structure, choice: Choice, checkpoint_format: str) -> int:
    """Return the bytes of all tensors of the checkpoint to be made, from headers alone.

    Scales are assumed to have the dtype of the source's weight.
    """
    total, taken = 0, set()
    for module, scheme in choice.schemes.items():
        stored = structure.weights[module].tensor
        taken.add(stored)
        dtype = source.tensors[stored][1].dtype
        tensors = weight_tensors(checkpoint_format, scheme, module, structure.linear[module], dtype)
        total += sum(tensor.nbytes for tensor in tensors)
    total += sum(info.nbytes for name, (_, info) in source.tensors.items() if name not in taken)
    if choice.kv_cache:
        form = layout(checkpoint_format)
        scales = [name for attention in structure.attention for name in form.kv_scale_names(attention)]
        total += len(scales) * tensor_bytes("BF16", ())
    return total


def require_memory(source_bytes: int, memory: int, device: str, engine: str) -> None:
    """Raise `UserError` where a model of ``source_bytes``, with a fifth on top, does not fit in ``memory`` bytes.

    ``device`` and ``engine`` are named in the message.
    """
    needed = int(source_bytes * _FACTOR)
    if needed > memory:
        raise UserError(
            f"engine {engine} holds the whole 16-bit model: about {size(needed)}, {device} has {size(memory)}.",
            hint="The engine stream does not: it takes a few tensors at a time, whatever the model's size.",
        )
