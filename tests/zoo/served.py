"""Serve the zoo's models in vLLM's CPU build, and hold each checkpoint's answers against the reference runtime.

    python -m tests.zoo.served --only llama mixtral --columns ptpc_fp8 ptpc_fp8_quark --json tests/zoo/served.json

The source and its checkpoint answer the same prompt in vLLM, which computes in bfloat16, and in the reference runtime,
which computes in float32. The distance of two answers is the mean |difference| of their log probabilities, in nats.
A checkpoint agrees where the distance is explained by that of its source: see `verdict`. What vLLM's CPU build lacks
and no checkpoint can help is made up for by `served_in_vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from tests.zoo import matrix
from tests.zoo.models import names, table, write, write_config
from tests.zoo.served_in_vllm import prompt

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "ptpc_fp8": ("--scheme", "ptpc_fp8"),
    "ptpc_fp8_quark": ("--scheme", "ptpc_fp8", "--format", "quark"),
    "fp8_block": ("--scheme", "fp8_block"),
}
"""Options of `quantmint quantize` by column: schemes and layouts that vLLM's CPU build loads, the last with AMX."""

OUTCOMES = ("agrees", "differs", "not loaded", "source differs", "source not loaded", "no reference", "not made")

_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the one size of vLLM's CPU kernels
_GRANITE = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.2}
_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Fields of the zoo's configurations that a served model has otherwise.
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "axk1": {**_LATENT, "first_k_dense_replace": 0},  # vLLM misses a norm of dense layers that no checkpoint has
    **dict.fromkeys(("axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "kimi_linear"), _LATENT),
    **dict.fromkeys(("mistral4", "youtu"), _LATENT),
    "longcat_flash": {**_LATENT, "head_dim": 64},
    "kimi_k25": {"text_config": _LATENT},
    "deepseek_v4": {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
    # As released, the logits of so small a model are all alike, whatever its weights are.
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"), _GRANITE),
    "granitemoehybrid": _GRANITE,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _DELTA),
    **{name: {"text_config": _DELTA} for name in ("qwen3_5", "qwen3_5_moe", "qwen4_exp", "minicpmv4_6")},
    "llama4_text": {"attention_chunk_size": 256},  # a multiple of vLLM's block
    "llama4": {"text_config": {"attention_chunk_size": 256}},
    "nemotron_h": {"hybrid_override_pattern": "M-*-"},  # no experts without a gate on a CPU
}
_RELEASES = Path(__file__).with_name("releases.yaml")
_SCRIPT = Path(__file__).with_name("served_in_vllm.py")


@dataclass(frozen=True, slots=True)
class ServedOutcome:
    """What came of serving one checkpoint; distances are in nats, and None where an answer is missing.

    ``outcome`` is one of `OUTCOMES`. ``noise`` lies between vLLM and the reference runtime for the source, ``distance``
    between them for the checkpoint, both with activations in 16 bit; ``rounded`` is that with activations rounded.
    Where the source differs, ``distance`` is how far the checkpoint is from it in vLLM.
    ``apart`` is how far the checkpoint is from its source in the reference runtime.
    """

    name: str
    column: str
    outcome: str
    reason: str = ""
    noise: float | None = None
    distance: float | None = None
    rounded: float | None = None
    apart: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Log probabilities of the prompt's tokens but the first, nats; or the reason why there are none.

    ``plain`` are those with the activations of quantized layers left in 16 bit. ``tower`` is the reason why a model's
    towers were left out.
    """

    logprobs: tuple[float, ...] = ()
    plain: tuple[float, ...] = ()
    error: str = ""
    tower: str = ""
    seconds: float = 0.0


Answers = tuple[Answer, Answer]
"""The answers of vLLM and of the reference runtime."""


def verdict(name: str, column: str, source: Answers, checkpoint: Answers) -> ServedOutcome:
    """Judge a checkpoint by the answers to its source and to itself.

    Without rounded activations, what vLLM's arithmetic does to the source explains the distance of a checkpoint that
    is rightly read; a small part of what quantization changes is allowed beside it. With them, noise upstream flips
    roundings, so that two right servers are as far from each other as quantization moves either.
    """
    (served_source, reference_source), (served, reference) = source, checkpoint
    seconds = round(served_source.seconds + served.seconds, 1)
    if served_source.error:
        return ServedOutcome(name, column, "source not loaded", served_source.error, seconds=seconds)
    if served.error:
        return ServedOutcome(name, column, "not loaded", served.error, seconds=seconds)
    if error := reference_source.error or reference.error:
        return ServedOutcome(name, column, "no reference", error, seconds=seconds)
    if not all(map(isfinite, served_source.plain)):
        return ServedOutcome(name, column, "source differs", "vLLM's log probabilities are no numbers", seconds=seconds)
    if not all(map(isfinite, (*served.logprobs, *served.plain))):
        return ServedOutcome(name, column, "differs", "vLLM's log probabilities are no numbers", seconds=seconds)
    noise = distance(served_source.plain, reference_source.plain)
    far = distance(served.plain, reference.plain)
    rounded = distance(served.logprobs, reference.logprobs) if reference.logprobs else None
    apart = distance(reference.logprobs or reference.plain, reference_source.plain)
    outcome = "agrees" if far <= 2 * noise + 0.2 * apart and (rounded or 0.0) <= 2 * noise + 2 * apart else "differs"
    if noise > max(0.1, apart):  # vLLM computes the source otherwise than transformers: compare what quantization moves
        far = distance(served.plain, served_source.plain)
        outcome = "source differs" if far <= 3 * apart else "differs"
    tower = f"without its tower: {served.tower}" if served.tower else ""
    if served.tower and not served_source.tower:
        return ServedOutcome(name, column, "not loaded", served.tower, seconds=seconds)
    return ServedOutcome(
        name, column, outcome, tower, noise=noise, distance=far, rounded=rounded, apart=apart, seconds=seconds
    )


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the mean |difference|, nats."""
    return sum(abs(x - y) for x, y in zip(left, right, strict=True)) / len(left)


@contextmanager
def sized(name: str) -> Iterator[None]:
    """Within the block, give the model of the zoo the sizes that vLLM's CPU kernels have."""
    entry: Any = table()[name]
    with patch.dict(entry, {"config": merged(entry["config"], _SIZES.get(name, {}))}):
        yield


def merged(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other fields, also in its parts; a field that is None is dropped."""
    result = dict(config)
    for key, value in fields.items():
        result[key] = merged(result.get(key) or {}, value) if isinstance(value, Mapping) else value
    return {key: value for key, value in result.items() if fields.get(key, 0) is not None}


def staged(folder: Path) -> Path:
    """Return a folder beside ``folder`` with links to its files, and with a config.json as a release has it."""
    stage = folder.with_name(f"{folder.name}.served")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (stage / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    releases = yaml.safe_load(_RELEASES.read_text(encoding="utf-8"))
    config = merged(config, releases.get(config["architectures"][0], {}))
    (stage / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return stage


def reference_answer(folder: Path) -> Answer:
    """Return the reference runtime's answer.

    Layers with a state, which that runtime refuses, are no obstacle here: one prompt needs no padding.
    """
    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
    from quantmint.pipeline.quantize.formats.layout import Claims, layout_of
    from quantmint.pipeline.quantize.model.builder import meta_model
    from quantmint.pipeline.quantize.model.reader import read_structure
    from quantmint.pipeline.serving.reference.model import CheckpointLoader

    try:
        checkpoint = open_checkpoint(folder)
        structure = read_structure(folder, checkpoint.tensors, trust_remote_code=False)
        claims = Claims({}, {}, kv_cache=False)
        if structure.quantized_by is not None:
            modules = [*structure.linear, *structure.kept]
            claims = layout_of(checkpoint.config).claims(checkpoint.config["quantization_config"], modules)
        model = meta_model(folder).float().eval()
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        placing = CheckpointLoader(checkpoint, structure, claims, model, "cpu")
        placing.load_weights()
        plain = _logprobs(model)
        placing.round_activations()
        return Answer(_logprobs(model), plain)
    except Exception as error:  # the zoo goes on with the next model
        message = " ".join(str(error).split()).replace(f"{folder}: ", "")
        failure = Answer(error=f"{type(error).__name__}: {message}"[:300])
    try:
        return Answer((), _logprobs(_dequantized(folder)))
    except Exception:
        return failure


def _dequantized(folder: Path) -> Any:
    """Load a checkpoint as transformers loads a release, in float32, its quantized tensors dequantized on disk."""
    import torch

    from quantmint.pipeline.quantize.formats.checkpoint import Reader, open_checkpoint
    from quantmint.pipeline.quantize.formats.layout import layout_of
    from quantmint.pipeline.quantize.inspection.findings import expected_tensors
    from quantmint.pipeline.quantize.model.builder import meta_model
    from quantmint.pipeline.quantize.model.reader import read_structure
    from quantmint.pipeline.quantize.schemes.registry import dequantize

    checkpoint = open_checkpoint(folder)
    config, read = dict(checkpoint.config), Reader(checkpoint)
    tensors = {name: read(name) for name in checkpoint.tensors}
    if (declared := config.pop("quantization_config", None)) is not None:
        structure = read_structure(folder, checkpoint.tensors, trust_remote_code=False)
        claims = layout_of(checkpoint.config).claims(declared, [*structure.linear, *structure.kept])
        for module, stored in expected_tensors(checkpoint, structure, claims).items():
            parts = {part.role: tensors.pop(part.name) for part in stored}
            tensors[f"{module}.weight"] = dequantize(claims.schemes[module], parts)
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), tensors)
        write_config(Path(scratch), config)
        return type(meta_model(folder)).from_pretrained(scratch, dtype=torch.float32).eval()


def _logprobs(model: Any) -> tuple[float, ...]:
    import torch

    ids = torch.tensor([prompt()])
    with torch.inference_mode():
        logits = getattr(model, "thinker", model)(input_ids=ids, use_cache=False).logits
    logprobs = logits[0, :-1].float().log_softmax(-1)
    return tuple(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())


def vllm_answers(python: Path, folders: Sequence[Path], limit: float) -> Iterator[tuple[Path, Answer]]:
    """Yield folder and answer for each checkpoint, in order, from one process of vLLM's environment."""
    command = [str(python), str(_SCRIPT), "--limit", str(limit), *map(str, folders)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            facts = json.loads(line)
            numbers = (tuple(facts[key] or ()) for key in ("logprobs", "plain"))
            errors = ((facts[key] or "").replace(facts["folder"], "the folder")[:200] for key in ("error", "tower"))
            answer = Answer(*numbers, *errors, seconds=facts["seconds"])
            yield Path(facts["folder"]), answer


Folders = dict[tuple[str, str], Path]
"""Folder of each model and column; that of a source has the column ""."""


def serve(
    folders: Folders, python: Path, *, references: Folders | None = None, limit: float = 60.0
) -> Iterator[ServedOutcome]:
    """Yield the outcome of each checkpoint, served by one process of vLLM's environment; its source comes before it.

    ``python`` is the interpreter of that environment, ``limit`` the seconds that one checkpoint may take there.
    ``references`` are folders that the reference runtime reads instead of the served ones.
    """
    stages = {staged(folder): pair for pair, folder in folders.items()}
    answers: dict[tuple[str, str], Answers] = {}
    for stage, answer in vllm_answers(python, list(stages), limit):
        name, column = stages[stage]
        folder = (references or {}).get((name, column), folders[name, column])
        answers[name, column] = (answer, reference_answer(folder))
        if column:
            yield verdict(name, column, answers[name, ""], answers[name, column])


def make(name: str, columns: Sequence[str], workdir: Path) -> tuple[Folders, list[ServedOutcome]]:
    """Build a source and its checkpoints; return their folders, and the outcomes of those that are not made."""
    folders: Folders = {}
    refusals: list[ServedOutcome] = []
    with sized(name), patch.object(matrix, "COLUMNS", COLUMNS):
        folders[name, ""] = source = matrix.source(name, workdir)
        for column in columns:
            out = workdir / "made" / f"{name}-{column}"
            made = matrix.outcome_of(name, column, source, out, keep=True)
            if made.kind == "sound":
                folders[name, column] = out
            else:
                refusals.append(ServedOutcome(name, column, "not made", str(made), seconds=made.seconds))
    return (folders if len(folders) > 1 else {}), refusals


def run(
    models: Sequence[str],
    columns: Sequence[str],
    workdir: Path,
    python: Path,
    *,
    limit: float = 60.0,
    show: Callable[[ServedOutcome], object] = lambda outcome: None,
) -> list[ServedOutcome]:
    """Return the outcomes of all pairs, sorted. All checkpoints are made first, then served."""
    folders: Folders = {}
    outcomes: list[ServedOutcome] = []
    for name in models:
        made, refusals = make(name, columns, workdir)
        folders |= made
        outcomes += refusals
    for outcome in serve(folders, python, limit=limit):
        outcomes.append(outcome)
        show(outcome)
    return sorted(outcomes, key=lambda outcome: (outcome.name, outcome.column))


def write_outcomes(path: Path, outcomes: Iterable[ServedOutcome], versions: Mapping[str, str]) -> None:
    """Write versions, date and outcomes as JSON, a line for each pair; pairs of other models or columns stay."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))["outcomes"]
        rows = {(row["name"], row["column"]): row for row in before}
    for outcome in outcomes:
        fields = {key: value for key, value in asdict(outcome).items() if key != "seconds" and value not in (None, "")}
        row = {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
        rows[outcome.name, outcome.column] = row
    head = {"date": datetime.now(tz=UTC).date().isoformat(), "versions": dict(versions)}
    lines = ",\n".join(json.dumps(rows[pair]) for pair in sorted(rows))
    path.write_text(f'{json.dumps(head)[:-1]}, "outcomes": [\n{lines}\n]}}\n', encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as the command line says; return 1 where vLLM loads a source but not its checkpoint, or they differ."""
    from quantmint.pipeline.base.hardware import local_cpu_flags, refusal
    from quantmint.pipeline.serving.environment import find_vllm

    parser = argparse.ArgumentParser(
        description="Serve checkpoints of the zoo in vLLM's CPU build, and compare their log probabilities.",
        epilog="Example: python -m tests.zoo.served --only llama mixtral --json served.json",
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", choices=names(), help="models to serve (default: all)")
    add("--columns", nargs="+", choices=COLUMNS, default=["ptpc_fp8"], help="checkpoints of each (default: ptpc_fp8)")
    add("--json", type=Path, metavar="FILE", help="write the outcomes there, beside those of other models")
    add("--workdir", type=Path, metavar="FOLDER", help="keep sources and checkpoints there")
    add("--limit", type=float, default=60.0, metavar="SECONDS", help="time for one checkpoint in vLLM (default: 60)")
    options = parser.parse_args(arguments)
    for column in options.columns:
        why = refusal("cpu", column.removesuffix("_quark"), "auto", "compressed-tensors", cpu_flags=local_cpu_flags())
        if why is not None:
            parser.error(f"--columns {column}: {why}")
    vllm = find_vllm()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    matrix._prepare()
    with tempfile.TemporaryDirectory() as scratch:
        workdir = (options.workdir or Path(scratch)).absolute()
        outcomes = run(
            options.only or names(),
            options.columns,
            workdir,
            vllm.python,
            limit=options.limit,
            show=lambda outcome: sys.stderr.write(f"{outcome}\n"),
        )
    counts = Counter((outcome.column, outcome.outcome) for outcome in outcomes)
    for (column, kind), count in sorted(counts.items()):
        sys.stdout.write(f"{column:16} {kind:18} {count}\n")
    if options.json is not None:
        from quantmint.pipeline.serving.reference.model import reference_version

        write_outcomes(options.json, outcomes, {"vllm": vllm.version, "reference": reference_version()})
    return int(any(outcome.outcome in ("differs", "not loaded") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
