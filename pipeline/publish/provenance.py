"""The provenance of a release in standard forms: an in-toto statement with SLSA's predicate, and a CycloneDX SBOM.

The statement is in-toto's Statement v1 (https://in-toto.io/Statement/v1) with SLSA's provenance v1
(https://slsa.dev/spec/v1.0/provenance); docs/provenance.md explains the parameters of the build type. It is the
publisher's own statement: it claims no SLSA level, and deserves as much trust as the signature over the release.

The bill of materials lists the distributions in the stages' recorded environments, each once; a stage without a
recorded environment adds the tools of its record. Both documents follow from one `Manifest`, so they cannot disagree.
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
from quantmint.pipeline.recipe.models import COMMIT
from quantmint.pipeline.store.files import File
from quantmint.pipeline.store.toolchain import OURS, Environment

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License


ABSENT: Final = "absent"  # the version of an absent distribution in `pipeline.base.machine.versions`


STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILDER: Final = "pkg:generic/quantmint"
BUILD_TYPE: Final = f"{BUILDER}?build_type=1#docs/provenance.md"
"""The page of the repository that explains the parameters; the number changes with their meaning."""

_BYPRODUCTS = (f"{EVIDENCE}/gate.json", f"{EVIDENCE}/report.html", f"{EVIDENCE}/report.json")

Descriptor = dict[str, Any]


def statement(manifest: Manifest, files: Mapping[str, File]) -> dict[str, Any]:
    """Return the in-toto statement over a release's files, by their names in the release; no file is read.

    The manifest and the signature are written later and are no subjects, nor is the statement itself.
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
                        key: {"fingerprint": stage.fingerprint, "version": stage.version}
                        for key, stage in manifest.stages.items()
                    },
                },
                "resolvedDependencies": [
                    *_model(manifest.base),
                    *(descriptor for dataset in manifest.datasets for descriptor in _data(dataset)),
                    *_serving(manifest.serving.image),
                    # Installed distributions have no digest; one entry for each version.
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
                    "startedOn": min(stage.started for stage in manifest.stages.values()),
                    "finishedOn": max(stage.finished for stage in manifest.stages.values()),
                },
                "byproducts": [
                    {"name": name, "digest": {"sha256": files[name].sha256}} for name in _BYPRODUCTS if name in files
                ],
            },
        },
    }


def encode(value: Mapping[str, Any]) -> bytes:
    """Return the statement's bytes, equal for equal content."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def purl(name: str, version: str) -> str:
    """Return the package URL of a Python distribution; purl-spec requires a local version's plus sign escaped."""
    return f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version, safe='')}"


def _model(base: SourceRecord) -> Iterator[Descriptor]:
    """Yield the source model's repository at its commit, and each of its files."""
    repository = None if base.repo is None else f"hf://{base.repo}@{base.commit}"
    if repository is not None:
        yield {"name": "base", "uri": repository, "digest": {"gitCommit": base.commit}}
    for name, digest in base.files.items():
        at = {} if repository is None else {"uri": f"{repository}/{quote(name)}"}
        yield {"name": f"base/{name}", **at, "digest": {"sha256": digest}}


def _data(dataset: DatasetRecord) -> Iterator[Descriptor]:
    """Yield a data set by its file's digest, or at each of its commits, or without either by its name."""
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
    """Yield the serving container, if there was one; a runtime outside a container is among the tools."""
    if image is not None:
        digest = re.search(r"sha256:([0-9a-f]{64})", image)
        yield {"name": "serving", "uri": f"oci://{image}", **({"digest": {"sha256": digest[1]}} if digest else {})}


PYTHON: Final = "python"


@dataclass(slots=True)
class _Usage:
    """The stages that used a version of a distribution, and its declared licence."""

    licence: str | None = None
    stages: set[str] = field(default_factory=set)


def sbom(manifest: Manifest, environments: Mapping[str, Environment], files: Mapping[str, File]) -> bytes:
    """Return the CycloneDX 1.6 document as JSON, for the checkpoint's ``files`` by their names in the release.

    ``environments`` are the recorded ones by stage. The document is reproducible: its time is the time of the
    judgement, and its serial number follows from the content.
    """
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    usages = _usages(manifest, environments)
    components = [_component(name, release, usage) for (name, release), usage in sorted(usages.items())]
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
        "used": [[*key, usage.licence, sorted(usage.stages)] for key, usage in sorted(usages.items())],
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


def _usages(manifest: Manifest, environments: Mapping[str, Environment]) -> dict[tuple[str, str], _Usage]:
    """Return the uses by name and version, from the stages' recorded environments and the tools of their records."""
    usages: dict[tuple[str, str], _Usage] = {}

    def add(name: str, version: str, stage: str, licence: str | None = None) -> None:
        usage = usages.setdefault((name.lower().replace("_", "-"), version), _Usage())
        usage.licence = usage.licence or licence
        usage.stages.add(stage)

    for stage, environment in environments.items():
        add(PYTHON, environment.python, stage, "PSF-2.0")
        for name, distribution in environment.distributions.items():
            add(name, distribution.version, stage, distribution.licence)
    for stage, record in manifest.stages.items():
        for name, version in record.tools.items():
            if version != ABSENT:
                add(name, version, stage)
    return usages


def _component(name: str, version: str, usage: _Usage) -> Component:
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
        licenses=_licences(usage.licence),
        properties=[Property(name="quantmint:stages", value=" ".join(sorted(usage.stages)))],
    )


def _licences(declared_licence: str | None) -> list[License]:
    """Return a declared licence as an SPDX identifier, an SPDX expression, or a name."""
    from cyclonedx.model.license import DisjunctiveLicense, LicenseAcknowledgement, LicenseExpression
    from cyclonedx.spdx import fixup_id, is_expression

    if declared_licence is None:
        return []
    identifier, declared = fixup_id(declared_licence), LicenseAcknowledgement.DECLARED
    if identifier is not None:
        return [DisjunctiveLicense(id=identifier, acknowledgement=declared)]
    if is_expression(declared_licence):
        return [LicenseExpression(declared_licence, acknowledgement=declared)]
    return [DisjunctiveLicense(name=declared_licence, acknowledgement=declared)]
