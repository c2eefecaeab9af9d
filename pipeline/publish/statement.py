"""How a release was made, in the words that others read: an in-toto statement with a SLSA provenance predicate.

The format is in-toto's Statement v1 (https://in-toto.io/Statement/v1) and SLSA's provenance v1
(https://slsa.dev/spec/v1.0/provenance); what the parameters of this build type mean is said in docs/provenance.md. It
is what the publisher says: it claims no SLSA level, and it is worth as much as the signature over the release.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from pipeline.publish.lineage import Lineage
from pipeline.publish.manifest import Base, Dataset
from pipeline.publish.release import EVIDENCE, PROVENANCE, UNLISTED, File

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILDER: Final = "pkg:generic/quantmint"
BUILD_TYPE: Final = f"{BUILDER}?build_type=1#docs/provenance.md"
"""The page of the repository that says what the parameters mean; the number changes when that meaning does."""

_BYPRODUCTS = (f"{EVIDENCE}/gate.json", f"{EVIDENCE}/report.html", f"{EVIDENCE}/report.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")

Descriptor = dict[str, Any]


def statement(lineage: Lineage, files: Mapping[str, File], version: str) -> dict[str, Any]:
    """The statement over a release's files, by their names there; ``version`` is that of quantmint.

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
                "externalParameters": {"recipe": lineage.recipe},
                "internalParameters": {
                    "artefact": lineage.artefact,
                    "stages": {
                        key: {"fingerprint": made.fingerprint, "version": made.version}
                        for key, made in lineage.stages.items()
                    },
                },
                "resolvedDependencies": [
                    *_model(lineage.base),
                    *(descriptor for dataset in lineage.datasets for descriptor in _data(dataset)),
                    *_serving(lineage),
                    *(tool for name, versions in lineage.tools.items() for tool in _tools(name, versions)),
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"quantmint": version}},
                "metadata": {
                    "invocationId": lineage.stages["gate"].fingerprint,
                    "startedOn": min(made.started for made in lineage.stages.values()),
                    "finishedOn": max(made.finished for made in lineage.stages.values()),
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


def _model(base: Base) -> Iterator[Descriptor]:
    """The 16-bit model: its repository at a commit, and each file that was read."""
    place = None if base.repo is None else f"hf://{base.repo}@{base.commit}"
    if place is not None:
        yield {"name": "base", "uri": place, "digest": {"gitCommit": base.commit}}
    for name, digest in base.files.items():
        at = {} if place is None else {"uri": f"{place}/{quote(name)}"}
        yield {"name": f"base/{name}", **at, "digest": {"sha256": digest}}


def _data(dataset: Dataset) -> Iterator[Descriptor]:
    """A data set by the digest of its file or at each commit that was fetched; where none is known, by its name."""
    name = f"{dataset.role}/{dataset.name}"
    if dataset.sha256 is not None:
        yield {"name": name, "digest": {"sha256": dataset.sha256}}
        return
    commits = _COMMIT.findall(dataset.revision or "")
    for commit in commits:
        yield {"name": name, "uri": f"hf://datasets/{dataset.name}@{commit}", "digest": {"gitCommit": commit}}
    if not commits:
        yield {"name": name, "uri": f"hf://datasets/{dataset.name}"}


def _serving(lineage: Lineage) -> Iterator[Descriptor]:
    """The container that served, where there was one; what served without one is among the tools."""
    image = lineage.serving.image
    if image is not None:
        digest = re.search(r"sha256:([0-9a-f]{64})", image)
        yield {"name": "serving", "uri": f"oci://{image}", **({"digest": {"sha256": digest[1]}} if digest else {})}


def _tools(name: str, versions: str) -> Iterator[Descriptor]:
    """A distribution by package URL, of each version that a stage had; what is installed has no digest of its own."""
    for version in versions.split(", "):
        yield {"name": name, "uri": purl(name, version)}
