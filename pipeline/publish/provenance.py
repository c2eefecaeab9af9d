"""How a release was made, in words that others read: in-toto's statement with SLSA's predicate, and a CycloneDX bill.

The statement is in-toto's Statement v1 (https://in-toto.io/Statement/v1) with SLSA's provenance v1
(https://slsa.dev/spec/v1.0/provenance); what the parameters of this build type mean is said in docs/provenance.md. It
is what the publisher says: it claims no SLSA level, and it is worth as much as the signature over the release.

The bill of materials lists what the stages kept of the environments that they ran in, a distribution that several
stages ran on once; a stage that kept no environment adds the tools that its record names. Both are readings of one
`Manifest`, so that none says what another does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish.manifest import DatasetRecord, Manifest, SourceRecord
from quantmint.pipeline.publish.release import EVIDENCE, PROVENANCE, UNLISTED
from quantmint.pipeline.recipe.schema import COMMIT
from quantmint.pipeline.store.files import File
from quantmint.pipeline.store.toolchain import OURS, Environment

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License


ABSENT: Final = "absent"  # what `pipeline.base.machine.versions` says of a distribution that is not there


STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILDER: Final = "pkg:generic/quantmint"
BUILD_TYPE: Final = f"{BUILDER}?build_type=1#docs/provenance.md"
"""The page of the repository that says what the parameters mean; the number changes when that meaning does."""

_BYPRODUCTS = (f"{EVIDENCE}/gate.json", f"{EVIDENCE}/report.html", f"{EVIDENCE}/report.json")

Descriptor = dict[str, Any]


def statement(manifest: Manifest, files: Mapping[str, File]) -> dict[str, Any]:
    """The statement over a release's files, by their names there; those that the manifest lists are not read.

    The manifest and the signature come after the statement and are no subjects of it; nor is it one of itself.
    """
    subjects = sorted(name for name in files if name not in (*UNLISTED, PROVENANCE))
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": files[name].sha256}} for name in subjects],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"recipe": manifest.recipe},
                "internalParameters": {
                    "artefact": manifest.artefact,
                    "stages": {
                        key: {"fingerprint": made.fingerprint, "version": made.version}
                        for key, made in manifest.stages.items()
                    },
                },
                "resolvedDependencies": [
                    *_model(manifest.base),
                    *(descriptor for dataset in manifest.datasets for descriptor in _data(dataset)),
                    *_serving(manifest.serving.image),
                    # What is installed has no digest of its own; of each version that a stage had, one.
                    *(
                        {"name": name, "uri": purl(name, version)}
                        for name, versions in manifest.tools.items()
                        for version in versions.split(", ")
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"quantmint": manifest.quantmint}},
                "metadata": {
                    "invocationId": manifest.stages["gate"].fingerprint,
                    "startedOn": min(made.started for made in manifest.stages.values()),
                    "finishedOn": max(made.finished for made in manifest.stages.values()),
                },
                "byproducts": [
                    {"name": name, "digest": {"sha256": files[name].sha256}} for name in _BYPRODUCTS if name in files
                ],
            },
        },
    }


def encode(value: Mapping[str, Any]) -> bytes:
    """The statement's bytes: the same for the same content."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def purl(name: str, version: str) -> str:
    """A distribution of Python as a package URL; a local version's plus sign is escaped, as purl-spec asks."""
    return f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version, safe='')}"


def _model(base: SourceRecord) -> Iterator[Descriptor]:
    """The 16-bit model: its repository at a commit, and each file that was read."""
    place = None if base.repo is None else f"hf://{base.repo}@{base.commit}"
    if place is not None:
        yield {"name": "base", "uri": place, "digest": {"gitCommit": base.commit}}
    for name, digest in base.files.items():
        at = {} if place is None else {"uri": f"{place}/{quote(name)}"}
        yield {"name": f"base/{name}", **at, "digest": {"sha256": digest}}


def _data(dataset: DatasetRecord) -> Iterator[Descriptor]:
    """A data set by the digest of its file or at each commit that was fetched; where none is known, by its name."""
    name = f"{dataset.role}/{dataset.name}"
    if dataset.sha256 is not None:
        yield {"name": name, "digest": {"sha256": dataset.sha256}}
        return
    commits = COMMIT.findall(dataset.revision or "")
    for commit in commits:
        yield {"name": name, "uri": f"hf://datasets/{dataset.name}@{commit}", "digest": {"gitCommit": commit}}
    if not commits:
        yield {"name": name, "uri": f"hf://datasets/{dataset.name}"}


def _serving(image: str | None) -> Iterator[Descriptor]:
    """The container that served, where there was one; what served without one is among the tools."""
    if image is not None:
        digest = re.search(r"sha256:([0-9a-f]{64})", image)
        yield {"name": "serving", "uri": f"oci://{image}", **({"digest": {"sha256": digest[1]}} if digest else {})}


PYTHON: Final = "python"


@dataclass(slots=True)
class _Found:
    """A version of a distribution, with the stages that ran on it."""

    licence: str | None = None
    stages: set[str] = field(default_factory=set)


def sbom(manifest: Manifest, environments: Mapping[str, Environment], files: Mapping[str, File]) -> bytes:
    """The document as JSON (CycloneDX 1.6), for ``files`` of the checkpoint by their names in the release.

    ``environments`` are by the keys of the stages that kept theirs. Neither clock nor chance has a part in it: the time
    is that of the judgement, and the serial number follows from the content.
    """
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    used = _used(manifest, environments)
    components = [_component(name, release, found) for (name, release), found in sorted(used.items())]
    model = Component(
        name=manifest.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
        version=manifest.artefact[:16],
        description=manifest.title,
        properties=[Property(name="quantmint:artefact", value=manifest.artefact)],
        components=[
            Component(
                name=name,
                type=ComponentType.FILE,
                bom_ref=f"model/{name}",
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file.sha256)],
            )
            for name, file in sorted(files.items())
        ],
    )
    content = {
        "model": [manifest.name, manifest.artefact, manifest.created, manifest.title, manifest.quantmint],
        "files": {name: file.sha256 for name, file in files.items()},
        "used": [[*key, found.licence, sorted(found.stages)] for key, found in sorted(used.items())],
    }
    author = Component(name=OURS, type=ComponentType.APPLICATION, bom_ref=f"author/{OURS}", version=manifest.quantmint)
    bom = Bom(
        components=components,
        serial_number=uuid5(NAMESPACE_URL, f"quantmint:{fingerprint(content)}"),
        metadata=BomMetaData(
            timestamp=datetime.fromisoformat(manifest.created),
            component=model,
            tools=ToolRepository(components=[author]),
        ),
    )
    bom.register_dependency(model, components)
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return f"{text}\n".encode()


def _used(manifest: Manifest, environments: Mapping[str, Environment]) -> dict[tuple[str, str], _Found]:
    """Name and version of all that stages ran on: what they kept of their environments, and the tools they name."""
    found: dict[tuple[str, str], _Found] = {}

    def add(name: str, version: str, stage: str, licence: str | None = None) -> None:
        one = found.setdefault((name.lower().replace("_", "-"), version), _Found())
        one.licence = one.licence or licence
        one.stages.add(stage)

    for stage, environment in environments.items():
        add(PYTHON, environment.python, stage, "PSF-2.0")
        for name, distribution in environment.distributions.items():
            add(name, distribution.version, stage, distribution.licence)
    for stage, made in manifest.stages.items():
        for name, version in made.tools.items():
            if version != ABSENT:
                add(name, version, stage)
    return found


def _component(name: str, version: str, found: _Found) -> Component:
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    python = name == PYTHON
    purl = PackageURL("generic" if python else "pypi", None, name, version)
    return Component(
        name=name,
        type=ComponentType.PLATFORM if python else ComponentType.LIBRARY,
        bom_ref=str(purl),
        version=version,
        purl=purl,
        licenses=_licences(found.licence),
        properties=[Property(name="quantmint:stages", value=" ".join(sorted(found.stages)))],
    )


def _licences(said: str | None) -> list[License]:
    """What a distribution declares: an identifier or an expression of SPDX, or a name that is neither."""
    from cyclonedx.model.license import DisjunctiveLicense, LicenseAcknowledgement, LicenseExpression
    from cyclonedx.spdx import fixup_id, is_expression

    if said is None:
        return []
    known, declared = fixup_id(said), LicenseAcknowledgement.DECLARED
    if known is not None:
        return [DisjunctiveLicense(id=known, acknowledgement=declared)]
    if is_expression(said):
        return [LicenseExpression(said, acknowledgement=declared)]
    return [DisjunctiveLicense(name=said, acknowledgement=declared)]
