"""The bill of materials: a CycloneDX document of the model and of every distribution that it was made and proven with.

What is listed is what the stages kept of the environments that they ran in, and not what is installed when a release is
put together. A distribution that several stages ran on is one component, whose property ``quantmint:stages`` names
them; of two versions there are two. A stage that kept no environment adds the tools that its record names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final
from uuid import NAMESPACE_URL, uuid5

from pipeline.canonical import fingerprint
from pipeline.publish.lineage import ABSENT, Lineage
from pipeline.publish.release import File
from pipeline.toolchain import OURS

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License

PYTHON: Final = "python"


@dataclass(slots=True)
class _Found:
    """A version of a distribution, with the stages that ran on it."""

    licence: str | None = None
    stages: set[str] = field(default_factory=set)


def sbom(lineage: Lineage, files: Mapping[str, File], title: str, version: str) -> bytes:
    """The document as JSON (CycloneDX 1.6), for ``files`` of the checkpoint by their names in the release.

    ``version`` is that of quantmint, which is the document's author. Neither clock nor chance has a part in it: the
    time is that of the judgement, and the serial number follows from the content.
    """
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    used = _used(lineage)
    components = [_component(name, release, found) for (name, release), found in sorted(used.items())]
    model = Component(
        name=lineage.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
        version=lineage.artefact[:16],
        description=title,
        properties=[Property(name="quantmint:artefact", value=lineage.artefact)],
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
        "model": [lineage.name, lineage.artefact, lineage.judged, title, version],
        "files": {name: file.sha256 for name, file in files.items()},
        "used": [[*key, found.licence, sorted(found.stages)] for key, found in sorted(used.items())],
    }
    author = Component(name=OURS, type=ComponentType.APPLICATION, bom_ref=f"author/{OURS}", version=version)
    bom = Bom(
        components=components,
        serial_number=uuid5(NAMESPACE_URL, f"quantmint:{fingerprint(content)}"),
        metadata=BomMetaData(
            timestamp=datetime.fromisoformat(lineage.judged),
            component=model,
            tools=ToolRepository(components=[author]),
        ),
    )
    bom.register_dependency(model, components)
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return f"{text}\n".encode()


def _used(lineage: Lineage) -> dict[tuple[str, str], _Found]:
    """Name and version of all that stages ran on: what they kept of their environments, and the tools they name."""
    found: dict[tuple[str, str], _Found] = {}

    def add(name: str, version: str, stage: str, licence: str | None = None) -> None:
        one = found.setdefault((name.lower().replace("_", "-"), version), _Found())
        one.licence = one.licence or licence
        one.stages.add(stage)

    for stage, environment in lineage.environments.items():
        add(PYTHON, environment.python, stage, "PSF-2.0")
        for name, distribution in environment.distributions.items():
            add(name, distribution.version, stage, distribution.licence)
    for stage, made in lineage.stages.items():
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
