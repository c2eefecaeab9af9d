"""Whether provenance, bill of materials and licence say what quantmint.json says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.base.canonical import difference
from pipeline.publish.licences import table, terms
from pipeline.publish.manifest import Manifest
from pipeline.publish.provenance import PREDICATE_TYPE, STATEMENT_TYPE, Lineage, statement
from pipeline.publish.release import CARD, NOTICE, PROVENANCE, SBOM
from pipeline.publish.verify.subject import Check, Subject, fails, first, judged, not_checked
from pipeline.store.files import File


def check_provenance(subject: Subject) -> Check:
    """Hold the subjects against the files, then the rest against the statement that the manifest stands for."""
    manifest = subject.known
    found = subject.object(PROVENANCE)
    if (found.get("_type"), found.get("predicateType")) != (STATEMENT_TYPE, PREDICATE_TYPE):
        return fails("provenance", f"{PROVENANCE} is no in-toto statement of SLSA provenance v1")
    faults = list(_subjects(subject, found.get("subject")))
    files = {name: File(subject.folder / name, file.size, file.sha256) for name, file in manifest.files.items()}
    expected = statement(_lineage(manifest), files, manifest.quantmint)
    other = [change for change in difference(expected, found) if not change.path.startswith("$.subject")]
    faults += first(
        [
            f"{PROVENANCE}: {change.path[2:]} is {change.new!r:.60}, quantmint.json says {change.old!r:.60}"
            for change in other
        ],
        f"differences of {PROVENANCE} from quantmint.json",
    )
    base = manifest.base
    origin = f"{base.repo}@{base.commit}" if base.repo else f"a folder ({str(base.sha256)[:16]}…)"
    return judged("provenance", faults, f"from {origin} by {len(manifest.stages)} stages, as quantmint.json says")


def _subjects(subject: Subject, found: object) -> Iterator[str]:
    """Files of which the statement speaks otherwise than they are; each once."""
    if not isinstance(found, list):
        yield f"{PROVENANCE} has no subjects"
        return
    said: dict[str, Any] = {}
    for entry in found:
        name, digest = entry["name"], entry["digest"]["sha256"]
        if name in said:
            yield f"{PROVENANCE} speaks twice of {name}"
        said[name] = digest
    wanted = {name for name in subject.known.files if name != PROVENANCE}
    for name in sorted(said.keys() | wanted):
        if name not in wanted:
            yield f"{PROVENANCE} speaks of {name}, which quantmint.json does not list"
        elif name not in said:
            yield f"{PROVENANCE} does not speak of {name}"
        elif subject.digests.get(name, said[name]) != said[name]:
            yield f"{PROVENANCE} speaks of another {name}: its SHA-256 is not that of the file"


def _lineage(manifest: Manifest) -> Lineage:
    return Lineage(
        recipe=manifest.recipe,
        artefact=manifest.artefact,
        base=manifest.base,
        stages=manifest.stages,
        datasets=manifest.datasets,
        tools=manifest.tools,
        serving=manifest.serving,
        hardware=manifest.hardware,
        environments={},
    )


def check_sbom(subject: Subject) -> Check:
    """Read the CycloneDX document and look every recorded tool up in it."""
    data = subject.object(SBOM)
    if data.get("bomFormat") != "CycloneDX" or not isinstance(data.get("components"), list):
        return fails("sbom", f"{SBOM} is no CycloneDX document")
    listed = {(entry.get("name"), entry.get("version")) for entry in data["components"] if isinstance(entry, dict)}
    faults = [
        f"{SBOM} does not list {tool} {version}, which quantmint.json names"
        for tool, versions in subject.known.tools.items()
        for version in versions.split(", ")
        if (tool.lower().replace("_", "-"), version) not in listed
    ]
    faults += _model(subject, data)
    return judged("sbom", faults, f"{len(listed)} components, every recorded tool among them")


def _model(subject: Subject, data: Mapping[str, Any]) -> Iterator[str]:
    """Files of the model that the document says other digests of."""
    for entry in data["metadata"]["component"].get("components", ()):
        found = {content["content"] for content in entry["hashes"] if content["alg"] == "SHA-256"}
        here = subject.known.files.get(entry["name"])
        if here is None or found != {here.sha256}:
            yield f"{SBOM} speaks of another {entry['name']} than quantmint.json"


def check_licence(subject: Subject) -> Check:
    """Look the licence that the card names up, and what it asks for among the files."""
    text = subject.text(CARD)
    data = subject.front_matter
    top = [name for name in subject.listing.files if "/" not in name]
    found = terms(data, top)
    key = found.hub_name or found.id
    if key not in table():
        named = f"{found.name} is not in the table of licences" if key != "unknown" else "the card names no licence"
        return not_checked("licence", f"{named}, so what it asks of those who pass the model on is not known here")
    faults = []
    link = data.get("license_link")
    copies = [name for name in found.files if name.upper().startswith(("LICENSE", "LICENCE"))]
    if table()[key].get("text") and not copies and not link:
        faults.append(f"{found.name} must go with the files, and there is neither LICENSE nor a link to it")
    notices = [name for name in (NOTICE, *found.files) if subject.has(name)]
    if found.notice is not None and not any(found.notice in _flat(subject.text(name)) for name in notices):
        faults.append(f"{found.name} asks for a file NOTICE that says: {found.notice}")
    faults += [
        f"{found.name} asks the card to say: {sentence}"
        for sentence in found.display
        if _flat(sentence) not in _flat(text)
    ]
    beside = f", with {', '.join(found.files)}" if found.files else ""
    return judged("licence", faults, f"{found.name}{beside}")


def _flat(text: str) -> str:
    return " ".join(re.sub(r"\\(.)", r"\1", text).split())
