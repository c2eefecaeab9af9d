"""The parts of a card that are tables and lists: the figures at its head, how it was made, limits, how to verify."""

from __future__ import annotations

from collections.abc import Iterator

from eval.gate import GateReport
from eval.report import markdown
from eval.report.numbers import NO_BREAK, size
from eval.report.summary import tiles
from pipeline.publish.card.facts import Base, Calibrated, CardFacts
from pipeline.publish.card.words import Markdown, block, code, codes, escaped, link, table
from pipeline.publish.release import EVIDENCE, NOTICE, SIGNATURE

_HUB = "https://huggingface.co"
_ENGINES = {"stream": "quantmint", "llmcompressor": "llm-compressor", "quark": "AMD Quark"}


def base_link(base: Base) -> Markdown:
    """The base by its name; that of a repository with its address."""
    return Markdown(escaped(base.name)) if base.repo is None else link(base.repo, f"{_HUB}/{base.repo}")


def figures(facts: CardFacts, gate: GateReport) -> Markdown:
    """What people ask for first: size, the worst change of accuracy, throughput, room in the cache."""
    rows = [(caption, Markdown(f"**{escaped(figure)}**"), said) for caption, figure, said in tiles(facts.report, gate)]
    return table(("Measure", "Value", "Detail"), rows)


def made(facts: CardFacts) -> Markdown:
    """How it was made, a row for each thing that a reader could choose otherwise."""
    return table(("What", "How"), _made(facts))


def _made(facts: CardFacts) -> Iterator[tuple[str, str]]:
    how, base = facts.made, facts.base
    if base.commit is not None:
        origin = f"{base_link(base)} at {code(base.commit, cell=True)}"
    else:
        origin = f"{base_link(base)}, a folder that is not on the Hub; SHA-256 {code(base.digest or '-', cell=True)}"
    yield "Base", Markdown(origin)
    yield "Scheme", Markdown(f"{code(how.scheme, cell=True)}: {escaped(how.description)}")
    if len(how.schemes) > 1:
        counted = (f"{code(name, cell=True)} {count:,}" for name, count in how.schemes.items())
        yield "Modules by scheme", Markdown(", ".join(counted))
    elif how.schemes:
        yield "Modules", f"{sum(how.schemes.values()):,} linear layers"
    yield "KV cache", "FP8, with calibrated static scales" if how.kv_cache == "fp8" else "16 bit"
    if how.kept:
        yield f"Left in 16{NO_BREAK}bit", codes(how.kept)
    if how.excluded:
        yield "Left out by the recipe", codes(how.excluded)
    yield "Calibration", "none: no scale depends on data" if how.calibration is None else _texts(how.calibration)
    engine = _ENGINES.get(how.engine, how.engine)
    yield "Made by", engine if how.algorithm == "none" else f"{engine}, {how.algorithm}"
    yield "Layout", how.format
    sizes = facts.report["size"]
    yield "Weights", f"{size(sizes['baseline_bytes'])} before, {size(sizes['candidate_bytes'])} after"
    yield "Checkpoint", Markdown(f"SHA-256 {code(facts.artefact, cell=True)}")


def _texts(texts: Calibrated) -> Markdown:
    where = escaped(texts.name)
    if texts.dataset is not None:
        where = link(texts.dataset, f"{_HUB}/datasets/{texts.dataset}")
        where += f" at {code(texts.revision, cell=True)}" if texts.revision else ""
    elif texts.sha256 is not None:
        where += f" (SHA-256 {code(texts.sha256, cell=True)})"
    total = "" if texts.tokens is None else f", {texts.tokens:,} tokens in all"
    return Markdown(f"{where}: {texts.samples:,} samples of at most {texts.sequence_length:,} tokens{total}")


def limits(facts: CardFacts, gate: GateReport) -> list[Markdown]:
    """What the figures do not say, those of the report first."""
    return [*map(Markdown, markdown.limits(gate)), *(Markdown(escaped(said)) for said in _limits(facts, gate))]


def _limits(facts: CardFacts, gate: GateReport) -> Iterator[str]:
    if gate.canary is not None:
        yield (
            f"The canary compared the next token at {gate.canary.positions:,} places of {gate.canary.prompts} prompts:"
            " it finds what is broken, not what is a little worse."
        )
    planned = [
        launch.title
        for launch in facts.launches
        if not launch.refusal and launch.target.partition(":")[0] != gate.hardware
    ]
    if planned:
        yield f"The commands for {' and '.join(planned)} are planned; nothing on this card was measured with them."
    if facts.made.calibration is not None and facts.made.kv_cache == "fp8":
        yield "The scales of the KV cache are those of the calibration texts: larger values are clipped."
    yield "Safety, refusals and bias were not measured: what the base's card says of them was said of 16 bit."


def verifying(facts: CardFacts) -> Markdown:
    """What proves that these are the files that were judged, by quantmint and without it."""
    subject = facts.repo or facts.name
    key = {"key": " --key PUBLIC_KEY", "keyless": " --identity WHO --issuer ISSUER", None: " --unsigned"}[facts.signed]
    parts = [
        block([f"quantmint verify {subject}{key}", f"quantmint gate {subject}"]),
        "The first checks digests, provenance and structure" + (", and who signed them" if facts.signed else "")
        + f"; the second judges again, from every item's score. What both read lies in [{EVIDENCE}/]({EVIDENCE}):"
        f" [the report]({EVIDENCE}/report.html), the gate's record, the provenance and the list of tools.",
    ]  # fmt: skip
    if facts.signed is None:
        parts.append("It is not signed: the digests say that the files belong together, not who made them.")
        return Markdown("\n\n".join(parts))
    name = facts.title
    how = {"key": "key", "keyless": "sigstore"}[facts.signed]
    who = {"key": "--public_key PUBLIC_KEY", "keyless": "--identity WHO --identity_provider ISSUER"}[facts.signed]
    lines = [] if facts.repo is None else [f"hf download {facts.repo} --local-dir {name}"]
    lines += [
        f"model_signing verify {how} {name} --signature {name}/{SIGNATURE} \\",
        f"  --ignore-paths {name}/.cache {who}",
    ]
    return Markdown("\n\n".join([*parts, "The signature alone, by the tool of its own project:", block(lines)]))


def licence(facts: CardFacts) -> Markdown:
    """The terms, what they ask to be shown, and where their text is."""
    terms = facts.terms
    base = base_link(facts.base)
    if terms.id == "unknown":
        said = f"The card of {base} states no licence: nobody has said that its weights may be passed on."
        return Markdown(said)
    name = escaped(terms.name) if terms.link is None else link(terms.name, terms.link)
    parts = [
        f"{base} is under the {name}, and so is this checkpoint. It is not the base: its weights were quantized, its"
        " configuration declares how, and this card replaces the base's.",
        *(f"**{escaped(said)}**" for said in terms.display),
    ]
    if terms.conditions:
        parts.append("\n".join(f"- {escaped(condition)}" for condition in terms.conditions))
    texts = [*terms.files, *([NOTICE] if terms.notice else [])]
    if texts:
        parts.append(f"Its text goes with these files: {', '.join(link(name, name) for name in texts)}.")
    return Markdown("\n\n".join(parts))
