"""Draft a first recipe for a user's own model: `quantmint recipe init`.

A text is cut into passages. Evenly spread ones are held out for a perplexity task, the others calibrate; no passage
does both.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantmint.calibration.encodings import with_old_modelopt
from quantmint.eval import workloads
from quantmint.eval.suites import SuiteTask
from quantmint.pipeline.base.argument import classify
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware, local_cpu_flags, refusal
from quantmint.pipeline.base.schemes import scheme as scheme_of
from quantmint.pipeline.recipe.destinations import section_of
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.recipe.modules import expert_count
from quantmint.pipeline.recipe.quantization import AUTO

_WORDS, _FEWEST, _MOST = 150, 40, 800
"""Words of a passage at least; passages that a text must have; those that are held out at most."""
_BASES: Final[Mapping[str, str]] = {
    "ptpc_fp8": "_base-ptpc",
    "fp8": "_base-fp8kv",
    **dict.fromkeys(("mxfp4", "mxfp4_fp8", AUTO), "_base-mxfp4"),
}
_CHOICES: Final = ("mxfp4", "ptpc_fp8")
"""Schemes that `scheme: auto` of a drafted recipe chooses from."""
_SPREAD: Final = 0.02  # nats a word, between documents: what shipped suites expect of a sound checkpoint


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The options of a draft: ``model`` is a folder or org/name, ``publish`` a destination (None: ./published)."""

    model: str
    name: str
    target: str
    scheme: str
    text: Path | None = None
    publish: str | None = None
    gpus: int = 1


def default_name(model: str, scheme: str) -> str:
    """Return a recipe's name: the model's own name and the scheme's, in lower case."""
    last = re.sub(r"[^a-z0-9.]+", "-", model_name(model).lower()).strip("-")
    return f"{last}-{scheme.replace('_', '-')}"


def default_scheme(target: str) -> str:
    """Return "mxfp4" for a target that multiplies four-bit numbers (gfx950), else "ptpc_fp8", without calibration."""
    return "mxfp4" if hardware(target).arch == "gfx950" else "ptpc_fp8"


def draft(options: DraftOptions, folder: Path) -> Mapping[Path, str]:
    """Return the text of each file of a recipe in ``folder``, by path; the recipe comes last.

    Raises `UserError` for a model that is neither a folder nor a repository, and for a text of too few passages.
    """
    files: dict[Path, str] = {}
    samples = 0
    if options.text is not None:
        held_out, calibrating = split(passages(options.text))
        samples = min(512, max(1, sum(len(text.split()) for text in calibrating) // 512))  # a word has a token or more
        files |= _evaluation(options.name, folder / f"{options.name}-eval", options.text.name, held_out, calibrating)
    files[folder / f"{options.name}.yaml"] = _recipe(options, folder, samples)
    return files


def write(files: Mapping[Path, str], prove: Callable[[Path], object] = load_recipe) -> Sequence[Path]:
    """Write the drafted files, check the recipe, which is the last of them, with ``prove``, and return their paths.

    If anything fails, no file stays. Raises `UserError` for a file that exists already, and what ``prove`` raises.
    """
    there = [path for path in files if path.exists()]
    if there:
        raise UserError(
            f"{there[0]} is there already, and nothing is written over", hint="--name chooses another name."
        )
    *_, recipe = files
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        prove(recipe)
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        for path in files:
            with suppress(OSError):  # somebody else's file is in it
                path.parent.rmdir()
        raise
    return tuple(files)


def passages(path: Path) -> list[str]:
    """Return the distinct passages of a text file, or of the key ``text`` of a file of JSON lines.

    Paragraphs are joined until a passage has `_WORDS` words. Raises `UserError` for a file that cannot be read or has
    fewer than `_FEWEST` passages.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"--text: {path} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"--text: {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f'--text: {path} is not JSON lines of passages, expected {{"text": "..."}} on each line; a file of prose '
            "has another ending"
        ) from None
    passages_, passage = [], ""
    for paragraph in re.split(r"\n\s*\n", text):
        passage = f"{passage}\n\n{paragraph.strip()}".strip()
        if len(passage.split()) >= _WORDS:
            passages_.append(passage)
            passage = ""
    if len(distinct := list(dict.fromkeys(passages_))) < _FEWEST:
        raise UserError(
            f"--text: found {len(distinct)} passages of {_WORDS} words in {path}, expected at least {_FEWEST}: "
            "some calibrate, others are held out"
        )
    return distinct


def split(texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return held-out passages, evenly spread, and calibrating ones: one of four is held out, `_MOST` at most."""
    step = max(4, -(-len(texts) // _MOST))
    return texts[::step], [text for number, text in enumerate(texts) if number % step]


def _evaluation(
    name: str, folder: Path, origin: str, held_out: Sequence[str], calibrating: Sequence[str]
) -> Mapping[Path, str]:
    task, texts = f"{name}-prose", f"{name}-texts"
    suite_task = SuiteTask(task, "word_perplexity", len(held_out), expected_flip_rate=0.03, expected_spread=_SPREAD)
    count = len(held_out)
    margin = max(0.02, math.ceil(100 * suite_task.detectable(looks=4)) / 100)
    return {
        folder / f"{texts}.jsonl": _lines(calibrating),
        folder / f"{texts}.yaml": (
            f"# Calibrates: {len(calibrating)} passages of {origin}; {name}-suite uses none of them.\n"
            f"name: {texts}\ndescription: Passages of {origin}.\nfile: {texts}.jsonl\ntext: text\n"
        ),
        folder / f"{task}.jsonl": _lines(held_out),
        folder / f"{task}.yaml": (
            f"# A task as lm-eval defines it: the perplexity of {len(held_out)} passages outside calibration.\n"
            f"task: {task}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {task}.jsonl}}}}\n"
            'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: text\n'
            "metric_list: [{metric: word_perplexity}]\n"
        ),
        folder / f"{name}-suite.yaml": (
            "# The tasks that decide the verdict. Add lm-eval's, such as {task: gsm8k, metric: exact_match,\n"
            "# filter: strict-match, items: 1319, data: [openai/gsm8k]}, or your own: docs/own-evaluation.md.\n"
            f"name: {name}-suite\ndescription: Prose of {origin}.\nexpected_flip_rate: 0.03\ntasks:\n"
            "  # A perplexity's margin is relative: 0.02 accepts 2 % more than the 16-bit model has. This is the\n"
            f"  # least whole per cent that {count} passages can test. Large models rise by less than 1 % in eight\n"
            "  # bits; one of 135M parameters rose by 2.7 to 3.6 % in FP8, by 1.3 % in FP8 by GPTQ, and by far\n"
            "  # more in four bits, so a small model may FAIL by its format alone; the run then prints a search\n"
            "  # that spends more bits. Choose the margin before the first run: reports tell every reader of a\n"
            "  # margin that was widened after a verdict.\n"
            f"  - {{task: {task}, metric: word_perplexity, items: {len(held_out)}, expected_spread: {_SPREAD}, "
            f"margin: {margin:.2f}}}\n"
        ),
    }


def _lines(texts: Sequence[str]) -> str:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def _recipe(options: DraftOptions, folder: Path, samples: int) -> str:
    """Return the recipe's text; ``samples`` are the calibration text's samples of 512 tokens, 0 without a text."""
    cpu, evaluation = options.target == "cpu", f"{options.name}-eval"
    base = _BASES.get(options.scheme, "_base")
    lines = [
        f"# quantmint plan {options.name}: what this makes, and what it takes. Keys: quantmint recipe schema.",
        f"name: {options.name}",
        f"description: {model_name(options.model)} in {options.scheme} for {options.gpus} x {options.target}.",
        f"extends: {base}",
        "",
        f"source: {_source(options.model, folder)}",
        f"quantization: {_quantization(options.scheme, base, cpu=cpu)}",
    ]
    if samples and options.scheme != "ptpc_fp8":
        lines.append(
            f"calibration: {{set: {evaluation}/{options.name}-texts.yaml, samples: {samples}, sequence_length: 512}}"
        )
    length, loads = (2048, ["tiny"]) if cpu else (8192, ["throughput", "latency", "tiny"])
    config = _config(options.model)
    length = min(length, config.get("max_position_embeddings", length))
    load = next((name for name in loads if max(cell.longest for cell in workloads.load(name).cells) <= length), "tiny")
    lines.append(
        f"target: {{hardware: {options.target}, gpus: {options.gpus}, workload: {load}, max_model_len: {length}}}"
    )
    evaluation_keys = (
        []
        if options.text is None
        else [f"suite: {evaluation}/{options.name}-suite.yaml", f"concurrency: {8 if cpu else 64}"]
    )
    if cpu and (reason := _unserved(options.scheme, base, config)) is not None:
        lines.append(f"# {reason.partition(': ')[0]}.\n# transformers computes what the checkpoint means.")
        evaluation_keys.append("runtime: reference")
    if evaluation_keys:
        lines.append(f"evaluation: {{{', '.join(evaluation_keys)}}}")
    if cpu:
        lines.append("gate: {throughput: {min_ratio: null}}  # a CPU shows no speed of a GPU: none is promised")
        if "avx512f" not in (local_cpu_flags() or ()):
            lines.append(
                "serve: {knobs: {--dtype: float32}}  # bfloat16 is slow without AVX-512; both sides are served so"
            )
    place = section_of(options.publish or "published")
    lines.append(f"publish: {place}  # only what passed; `licence: {{id: apache-2.0}}` where the model says none")
    return "\n".join(lines) + "\n"


def _config(model: str) -> Mapping[str, Any]:
    """Return a folder's config.json; empty for a model of the Hub, which the plan holds against its configuration."""
    with suppress(OSError, ValueError):
        config = json.loads((Path(model) / "config.json").read_bytes())
        return with_old_modelopt(config, Path(model)) if isinstance(config, dict) else {}
    return {}


def _unserved(scheme: str, base: str, config: Mapping[str, Any]) -> str | None:
    """Return why vLLM for this CPU does not load the scheme, for experts too where the model has some; else None."""
    layout = "compressed-tensors" if base == "_base-ptpc" else "quark"
    flags = local_cpu_flags()
    for name in _CHOICES if scheme == AUTO else (scheme,):
        experts = (name,) if expert_count(config) else ()
        reason = refusal("cpu", name, "auto", layout, expert_schemes=experts, cpu_flags=flags)
        if reason is not None:
            return reason
    return None


def model_name(model: str) -> str:
    """Return the last part of a folder's path or of a repository's name."""
    return classify(model).place.rstrip("/").rpartition("/")[2]


def _source(model: str, folder: Path) -> str:
    argument = classify(model)
    if argument.kind == "folder":
        typed = Path(model)
        return f"{{folder: {json.dumps(model if typed.is_absolute() else os.path.relpath(typed, folder))}}}"
    if argument.kind == "repository":
        return f"{{repo: {argument.place.removeprefix('hf://')}, revision: {argument.revision or 'main'}}}"
    raise UserError(f"MODEL: found {model!r}, expected a folder with a model, or org/name[@revision] of the Hub")


def _quantization(scheme: str, base: str, *, cpu: bool) -> str:
    cache = ", kv_cache: auto" if cpu and base != "_base-ptpc" else ""
    if scheme == AUTO:
        choice = f"scheme: auto, from: [{', '.join(_CHOICES)}], bits: 5.0{cache}"
        return f"{{{choice}}}  # `quantmint search` shows what bits buy"
    scheme_of(scheme)  # refuses a name that is none
    return f"{{scheme: {scheme}{cache}}}"
