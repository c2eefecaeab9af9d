"""quantize by a library: write the job, run it in a process of its own, read its result back and prove it.

The process gets no token and no network, its output goes to ``engine.log``, and it ends with this one. Its checkpoint
is compared with the job, then moved to its place by one rename.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.base.processes import run_logged
from quantmint.pipeline.quantize.device import device_memory, resolve_devices
from quantmint.pipeline.quantize.digest import companions
from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.quantize.engines.libraries.job import LibraryJob, require_memory, save_samples
from quantmint.pipeline.quantize.engines.libraries.result import adopt, differences, names_on_disk
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.stages.calibrate import data_identity, has_static_scales, read_tokens
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import CHECKPOINT, read_source
from quantmint.pipeline.stages.stage import Job, Output

LOG = "engine.log"
_WORK = "library"
_SHOWN = 5  # differences that an error names
MODULES = {"llmcompressor": ("llmcompressor",), "quark": ("quark", "ninja")}
"""Modules that a library's engine imports; our extra of the engine's name installs them."""
_TOOLS = {
    "stream": ("tokenizers",),
    "llmcompressor": ("llmcompressor", "compressed-tensors", "auto-round"),
    "quark": ("amd-quark",),
}


def calibrated(quantization: Quantization) -> bool:
    """Return whether quantization needs calibration texts: for static scales, or for its algorithm."""
    return has_static_scales(quantization) or algorithm(quantization.algorithm).calibrated


def settings(setting: Setting) -> Mapping[str, object]:
    """Return what enters the stage's fingerprint beside the recipe's quantization section.

    It is the algorithm's parameters and, where the library calibrates, the identity of the calibration data.
    """
    section = setting.recipe.calibration
    parameters = {"parameters": setting.recipe.quantization.parameters}
    if section is None or not calibrated(setting.recipe.quantization):
        return parameters
    return {**parameters, "calibration": data_identity(section, setting.commits)}


def tools(setting: Setting) -> Mapping[str, str]:
    """Return the versions of the engine's distributions, by name; for the stream engine only that of tokenizers."""
    return versions(*_TOOLS[setting.recipe.quantization.engine])


def run(job: Job) -> Output:
    """Make the checkpoint by the library that the recipe names, in a process of its own.

    Raises `UserError` where the source is encoded or the device too small, `StageError` where the library fails or
    writes another checkpoint than asked for.
    """
    quantization = job.setting.recipe.quantization
    job.progress.say("asking the model which of its modules are linear")
    source, structure = read_source(job)
    choice = select(structure, quantization)
    if caution := algorithm(quantization.algorithm).caution(quantization.schemes):
        job.progress.warn(caution)
    device = resolve_devices(job.setting.device)[0]
    if structure.encoded:
        raise UserError(
            f"engine {quantization.engine} reads 16-bit models only, {next(iter(structure.encoded))} is encoded.",
            hint="The engine stream decodes such a source on the way.",
        )
    require_memory(source.nbytes, device_memory(device), device, quantization.engine)
    final = job.path / CHECKPOINT
    if not final.is_dir():  # it is there where a run was stopped between the rename and the record
        _make(job, source, structure, choice, device, final)
    checkpoint = open_checkpoint(final)
    size = sum((final / shard).stat().st_size for shard in checkpoint.shards)
    return Output(
        result={
            "bytes": size,
            # Which type the scales have is the library's affair, so there is nothing to compare this with.
            "tensor_bytes": None,
            "modules": len(choice.schemes),
            "kept": len(choice.kept),
            "engine": {"name": quantization.engine, **tools(job.setting)},
        },
        summary=f"{size / 1e6:,.1f} MB from {source.nbytes / 1e6:,.1f} MB, {len(choice.schemes)} modules, "
        f"by {quantization.engine}",
    )


def _make(job: Job, source: Checkpoint, structure: Structure, choice: Choice, device: str, final: Path) -> None:
    quantization = job.setting.recipe.quantization
    trust = job.setting.recipe.trust_remote_code
    work = job.path / _WORK
    if work.exists():
        shutil.rmtree(work)  # a library does not go on where it was stopped
    work.mkdir(parents=True)
    written, adopted = work / "made", work / CHECKPOINT
    section, samples = job.setting.recipe.calibration, work / "samples.safetensors"
    if section is not None and calibrated(quantization):
        job.progress.say("reading the calibration texts")
        save_samples(read_tokens(section, source.folder, trust_remote_code=trust), samples)
    library_job = LibraryJob(
        source=str(source.folder),
        output=str(written),
        schemes={structure.modules[module]: scheme for module, scheme in choice.schemes.items()},
        kv_cache=choice.kv_cache,
        algorithm=quantization.algorithm,
        parameters=quantization.parameters,
        samples=str(samples) if samples.is_file() else None,
        batch_size=1 if section is None else section.batch_size,
        device=device,
        trust_remote_code=trust,
    )
    library_job.save(work / "job.json")
    log = job.path / LOG
    log.unlink(missing_ok=True)
    engine = quantization.engine
    job.progress.say(f"starting {engine}; its output goes to {log}")
    run_logged(
        _command(engine, work / "job.json"),
        log,
        what=f"engine {engine}",
        env=_environment(device),
    )
    job.progress.say(f"reading back what {engine} wrote")
    names = names_on_disk(source, structure, trust_remote_code=trust)
    try:
        adopt(written, adopted, names, source, choice, quantization.format)
        wrong = differences(
            open_checkpoint(adopted),
            source,
            structure,
            choice,
            checkpoint_format=quantization.format,
            algorithm_name=quantization.algorithm,
        )
        first = list(islice(wrong, _SHOWN + 1))
    except UserError as error:
        raise StageError(f"engine {engine} left no checkpoint that can be read: {error.message}") from error
    if first:
        ellipsis = "; …" if len(first) > _SHOWN else ""
        raise StageError(
            f"engine {engine} did not make what was asked for: {'; '.join(first[:_SHOWN])}{ellipsis}",
            hint=f"What it wrote is kept in {adopted}, its log is {log}.",
        )
    for copy, path in companions(source.folder, adopted, with_code=trust).items():
        shutil.copyfile(path, copy)
    adopted.rename(final)
    shutil.rmtree(work)


def _command(engine: str, job: Path) -> list[str]:
    """Return the command line of the program that imports the library ``engine`` and does the ``job`` file."""
    return [sys.executable, "-P", "-m", f"quantmint.pipeline.quantize.engines.libraries.with_{engine}", str(job)]


def _environment(device: str) -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    inherited = os.environ.get("PYTHONPATH")
    return {
        # amd-quark compiles an extension with the tools beside the interpreter.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": root if not inherited else f"{root}{os.pathsep}{inherited}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The libraries take an accelerator wherever they see one.
        **({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
    }
