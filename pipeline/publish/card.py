"""The card of a published checkpoint: README.md with metadata that the Hub reads, and scores beside it.

The template `README.md.j2` escapes every value but those of the class `Markdown`. Classes of the Hub's client write the
front matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml

from quantmint.eval.accuracy import Accuracy
from quantmint.eval.gate import GateReport
from quantmint.eval.report import markdown
from quantmint.eval.report.model import Report
from quantmint.eval.report.numbers import signed, size, unit_of
from quantmint.eval.report.summary import meaning, notes, runtime, tiles
from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.publish.licences import Terms
from quantmint.pipeline.publish.release import NOTICE, RECIPE
from quantmint.pipeline.recipe.quantization import Quantization

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True, slots=True)
class CardSource:
    """The 16-bit source model: the Hub's ``repo`` at a ``commit``, or a folder with a ``digest``.

    ``pictures`` says whether it reads images. ``metadata`` is the front matter of its own card.
    """

    name: str
    repo: str | None = None
    commit: str | None = None
    digest: str | None = None
    architecture: str = ""
    pictures: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """The calibration texts: a data set of the Hub at a revision, or a file by its SHA-256."""

    name: str
    samples: int
    sequence_length: int
    dataset: str | None = None
    revision: str | None = None
    sha256: str | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class QuantizationFacts:
    """The quantization of a checkpoint, by the recipe's ``section``.

    ``schemes`` counts quantized modules by scheme, the recipe's own first. ``kept`` are the modules that stay in 16 bit
    according to config.json, with N for the number of a layer or an expert.
    """

    section: Quantization
    schemes: Mapping[str, int] = field(default_factory=dict)
    unquantized: tuple[str, ...] = ()
    calibration: CalibrationText | None = None


@dataclass(frozen=True, slots=True)
class ServingCommand:
    """The command that serves the checkpoint on ``target``, or a ``refusal``.

    ``servers`` is the number of such commands that use all of the target's GPUs.
    """

    title: str
    target: str
    command: str = ""
    layout: str = ""
    servers: int = 1
    vllm: str = ""
    image: str | None = None
    cautions: tuple[str, ...] = ()
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts of one checkpoint.

    ``name`` is the recipe's, ``repo`` the Hub's repository (None: not published there). ``artefact`` is the digest of
    the checkpoint that the gate judged, ``judged`` the ISO 8601 time of the judgement. ``report`` is the content of
    report.json. ``signed`` tells the kind of signature: by a key, by an identity (keyless), or none.
    """

    name: str
    repo: str | None
    artefact: str
    judged: str
    base: CardSource
    quantization: QuantizationFacts
    terms: Terms
    launches: tuple[ServingCommand, ...]
    report: Report
    signed: Literal["key", "keyless"] | None = None

    @property
    def title(self) -> str:
        """Return the name of the repository, or the recipe's name if the release is on no repository."""
        return self.repo.rpartition("/")[2] if self.repo else self.name


_FEW: Final = 12


class Markdown(str):
    """Text that is Markdown and needs no escaping."""

    __slots__ = ()


def escaped(value: object) -> str:
    """Return a value as text, escaped so that Markdown shows it unchanged."""
    return value if isinstance(value, Markdown) else markdown.plain(str(value))


def code(text: str, *, cell: bool = False) -> Markdown:
    """Return text as inline code, with any backticks; in a ``cell`` of a table bars are escaped."""
    flat, ticks = " ".join(text.split()), "`"
    while ticks in flat:
        ticks += "`"
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return Markdown(f"{ticks}{pad}{flat.replace('|', chr(92) + '|') if cell else flat}{pad}{ticks}")


def codes(names: Iterable[str]) -> Markdown:
    """Return the first names as code in a table's cell, with the number of the others."""
    listed = list(names)
    suffix = f" and {len(listed) - _FEW} more" if len(listed) > _FEW else ""
    return Markdown(", ".join(code(name, cell=True) for name in listed[:_FEW]) + suffix)


def block(lines: str | Sequence[str], language: str = "sh") -> Markdown:
    """Return commands as a fenced block of code."""
    return Markdown(markdown.fenced(lines if isinstance(lines, str) else "\n".join(lines), language))


def link(text: str, address: str) -> Markdown:
    """Return a link to an https address or a file beside the card; plain text for addresses that could break out."""
    outside = address.startswith("https://")
    if any(char.isspace() or char in "<>()\\" for char in address) or (":" in address and not outside):
        return Markdown(f"{escaped(text)} ({escaped(address)})")
    return Markdown(f"[{escaped(text)}]({address})")


_TAG: Final = re.compile(r"\w[\w .+/-]{0,63}")  # the Hub itself makes tags with a colon: region:us, arxiv:...
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LANGUAGE: Final = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)?|code|multilingual")
_REPO: Final = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
#: Tags of the source that describe its files or services for them, and do not hold for the quantized files.
_GONE: Final = frozenset(
    (
        "pytorch", "tf", "jax", "flax", "onnx", "gguf", "ggml", "openvino", "mlx", "safetensors", "bf16", "bfloat16",
        "fp16", "float16", "fp32", "fp8", "int8", "unsloth", "text-generation-inference", "endpoints_compatible",
        "autotrain_compatible",
    )
)  # fmt: skip


def front_matter(facts: CardFacts) -> str:
    """Return the YAML front matter with its two lines of dashes."""
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**metadata(facts)).to_yaml()}\n---\n"


def metadata(facts: CardFacts) -> dict[str, Any]:
    """Return the front matter's fields that have a value; no base_model when the source is a folder."""
    terms, base, source_metadata = facts.terms, facts.base, facts.base.metadata
    texts = facts.quantization.calibration
    # The Hub shows a name and a link only with "other". Terms that must be accepted always get their link.
    linked = terms.link if terms.id == "other" or terms.acceptance else None
    fields: dict[str, Any] = {
        "base_model": [base.repo] if base.repo else None,
        "base_model_relation": "quantized" if base.repo else None,
        "license": terms.id,
        "license_name": terms.hub_name,
        "license_link": linked,
        "library_name": _word(source_metadata.get("library_name")) or "transformers",
        "pipeline_tag": _word(source_metadata.get("pipeline_tag")) or _pipeline_tag(base),
        "language": list(_words(source_metadata.get("language"), _LANGUAGE)),
        "tags": list(_tags(facts)),
        "datasets": list(_words(texts.dataset, _REPO)) if texts is not None else None,
    }
    return {key: value for key, value in fields.items() if value}


def _tags(facts: CardFacts) -> Iterator[str]:
    """Yield our tags, then the source's tags that still hold, each once."""
    section = facts.quantization.section
    ours = [scheme(section.scheme).weight_format.lower(), "ptpc" if section.scheme.startswith("ptpc") else "",
            section.algorithm if section.algorithm != "none" else "", section.format, "vllm", "quantmint"]  # fmt: skip
    yielded: set[str] = set()
    for tag in (*ours, *_words(facts.base.metadata.get("tags"))):
        if tag and tag.lower() not in yielded and (tag in ours or tag.lower() not in _GONE):
            yielded.add(tag.lower())
            yield tag


def _pipeline_tag(base: CardSource) -> str | None:
    if base.pictures and base.architecture.endswith("ForConditionalGeneration"):
        return "image-text-to-text"
    return "text-generation" if base.architecture.endswith("ForCausalLM") else None


def _word(value: object) -> str | None:
    return next(_words(value if isinstance(value, str) else None, _NAME), None)


def _words(value: object, form: re.Pattern[str] = _TAG) -> Iterator[str]:
    """Yield the words of a card's field, a string or a list, that have the form; YAML reads `no` as false."""
    items: Iterable[object] = value if isinstance(value, list) else [value]
    for item in items:
        word = "no" if item is False else item.strip() if isinstance(item, str) else ""
        if form.fullmatch(word):
            yield word


_HUB = "https://huggingface.co"
_ENGINES = {"stream": "quantmint", "llmcompressor": "llm-compressor", "quark": "AMD Quark"}


def eval_results(facts: CardFacts) -> dict[str, str]:
    """Return the texts of .eval_results by name in the release, of the tasks that are benchmarks of the Hub."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    benchmarks = load_table(__file__, "benchmarks.yaml")
    texts: dict[str, str] = {}
    for result in GateReport.from_json(facts.report["gate"]).accuracy:
        row = benchmarks.get(result.task)
        if row is None or row["metric"] != result.metric:
            continue
        entry = EvalResultEntry(
            dataset_id=row["dataset"],
            task_id=row["task_id"],
            value=round(100 * result.candidate, 2),
            date=facts.judged,
            source_url=None if facts.repo is None else f"https://huggingface.co/{facts.repo}/tree/main/quantmint",
            source_name=None if facts.repo is None else "quantmint's record of the evaluation",
            notes=_notes(result, row["items"], facts),
        )
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True, width=120)
        texts[f".eval_results/{result.task}.yaml"] = text
    return texts


def _notes(result: Accuracy, total: int, facts: CardFacts) -> str:
    """Return the note of a score: items, harness, baseline, change and interval."""
    unit = unit_of(result.kind)
    low, high = unit.span(result.interval_low, result.interval_high)
    items = f"{result.items:,} items" if result.items == total else f"{result.items:,} of {total:,} items"
    harness = f"lm-eval {facts.report['versions'].get('lm-eval', '')}".strip()
    return (
        f"{harness}, {items}; 16-bit baseline {100 * result.baseline:.2f} on the same items, change"
        f" {unit.words(result.difference)} with a {result.confidence:.0%} interval of {signed(low)} to"
        f" {signed(high)}"
    ).replace("\N{NO-BREAK SPACE}", " ")


_VERIFIED_BY: Final = {  # options of quantmint, and of the command `model_signing verify`
    "key": (" --key PUBLIC_KEY", "key", "--public_key PUBLIC_KEY"),
    "keyless": (" --identity WHO --issuer ISSUER", "sigstore", "--identity WHO --identity_provider ISSUER"),
    None: (" --unsigned", "", ""),
}
_MANY: Final = re.compile(r"\n{3,}")  # empty parts of the template leave blank lines


def render(facts: CardFacts) -> str:
    """Return the text of README.md."""
    report, launches, quantization = facts.report, facts.launches, facts.quantization
    gate, base = GateReport.from_json(report["gate"]), facts.base
    values = {
        "facts": facts,
        "gate": gate,
        "base": Markdown(escaped(base.name)) if base.repo is None else link(base.repo, f"{_HUB}/{base.repo}"),
        "meaning": meaning(report, gate),
        "runtime": runtime(report),
        "device": gate.device or gate.hardware,
        "day": facts.judged[:10],
        "not_passed": [Markdown(reason) for reason in markdown.not_passed(gate)],
        "notes": notes(report, gate),
        "figures": tiles(report, gate),
        "accuracy": Markdown(markdown.accuracy(gate)),
        "throughput": Markdown(markdown.throughput(report, gate)),
        "size": Markdown(markdown.size(report)),
        "scheme": scheme(quantization.section.scheme),
        "engine": _ENGINES.get(quantization.section.engine, quantization.section.engine),
        "run": block(f"quantmint run {RECIPE}"),
        "recipe": RECIPE,
        "hub": _HUB,
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "limits": [Markdown(limit) for limit in markdown.limits(gate)],
        "planned": [
            launch.title
            for launch in launches
            if not launch.refusal and launch.target.partition(":")[0] != gate.hardware
        ],
        "verified_by": _VERIFIED_BY[facts.signed],
        "texts": [*facts.terms.files, *([NOTICE] if facts.terms.notice else [])],
    }
    text = _environment().get_template("README.md.j2").render(values).strip()
    return f"{front_matter(facts)}\n{_MANY.sub(chr(10) * 2, text)}\n"


def release_title(facts: CardFacts) -> str:
    """Return the title of a release, one line of plain text."""
    section = facts.quantization.section
    cache_type = " with an FP8 KV cache" if section.kv_cache == "fp8" else ""
    return f"{facts.base.name} in {section.scheme}{cache_type}, {section.format}"


def notice_text(facts: CardFacts) -> str | None:
    """Return the text of the file NOTICE, or None when the source's licence requires none."""
    if facts.terms.notice is None:
        return None
    return f"{facts.terms.notice}\n\nThe weights were changed: {release_title(facts)}.\n"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - Markdown, escaped by `finalize`
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=escaped,
    )
    environment.filters |= {
        "code": code,
        "codes": codes,
        "cell": partial(code, cell=True),
        "block": block,
        "size": size,
    }
    environment.globals |= {"link": link}
    return environment
