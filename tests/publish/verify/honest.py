"""A whole release of a tiny model: a real quantized checkpoint, a judged record, and all that is said of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from quantmint.eval import record, suites, workloads
from quantmint.eval.gate import Policy, judge
from quantmint.eval.measurements import Measurements
from quantmint.eval.report import page as report_files
from quantmint.eval.report.model import DATA, Report
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish import card_record
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.card import CardFacts, render
from quantmint.pipeline.publish.licences import terms
from quantmint.pipeline.publish.manifest import (
    FileDigest,
    HardwareRecord,
    Manifest,
    ServingRecord,
    SourceRecord,
    StageRecord,
)
from quantmint.pipeline.publish.provenance import encode, sbom, statement
from quantmint.pipeline.publish.release import CARD, CARD_FACTS, EVIDENCE, MANIFEST, PROVENANCE, RECIPE, SBOM, UNLISTED
from quantmint.pipeline.quantize.digest import folder_digest
from quantmint.pipeline.quantize.inspection.findings import INSPECTION, Inspection
from quantmint.pipeline.recipe.load import PROVEN_SUITE
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.sections import Licence
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.stages.card import launches, vllm_of
from quantmint.pipeline.store.files import File
from tests.checkpoints import Checkpoint, answers

WHEN = "2026-03-14T09:26:53.000Z"
SUITE = """\
name: two
description: Two tasks, of which both decide.
expected_flip_rate: 0.04
tasks:
  - {task: facts, metric: acc, items: 400, gated: true, margin: 0.05}
  - {task: sums, metric: acc, items: 200, gated: true, margin: 0.08}
"""
INSPECTED = f"{EVIDENCE}/{INSPECTION}"
TOOLS = {"torch": "2.13.0", "transformers": "5.17.0"}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def listed(folder: Path) -> dict[str, FileDigest]:
    """What a manifest says of the files that are there."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: FileDigest(path.stat().st_size, sha256(path)) for name, path in names.items() if name not in UNLISTED}


def held(folder: Path) -> dict[str, File]:
    """The files that are there, as a release holds them."""
    return {name: File(folder / name, said.size, said.sha256) for name, said in listed(folder).items()}


def remanifest(folder: Path, **changes: Any) -> None:
    """What a forger does: quantmint.json lists the files as they are now."""
    manifest = manifests.read(folder / MANIFEST)
    (folder / MANIFEST).write_bytes(manifests.encode(replace(manifest, files=listed(folder), **changes)))


def forge(folder: Path, **changes: Any) -> None:
    """What a thorough forger does: provenance and quantmint.json agree with the files as they are now."""
    manifest = replace(manifests.read(folder / MANIFEST), **changes)
    (folder / PROVENANCE).write_bytes(encode(statement(manifest, held(folder))))
    remanifest(folder, **changes)


def _inspect(folder: Path, source: Path) -> Inspection:
    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
    from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
    from quantmint.pipeline.quantize.model.reader import read_structure

    checkpoint, original = open_checkpoint(folder), open_checkpoint(source)
    return inspect_checkpoint(checkpoint, read_structure(source, original.tensors), source=original)


def _measurements(artefact: str, sizes: tuple[int, int]) -> Measurements:
    """Two tasks of 400 and 200 items, few of them changed; a launch in each of two cells a side."""
    known = Checkpoint("llama-ptpc", nats=None).measurements()
    samples = {}
    for task, (items, right, lost, gained) in {"facts": (400, 360, 2, 3), "sums": (200, 160, 1, 1)}.items():
        before = [1.0] * right + [0.0] * (items - right)
        after = [0.0] * lost + before[lost:right] + [1.0] * gained + before[right + gained :]
        samples[task] = (answers(task, before), answers(task, after))
    return replace(known, artefact=artefact, samples=samples, weights=sizes)


def _payloads(commit: str, policy: Policy, recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Stages as a plan fingerprints them: each knows its inputs by their fingerprints."""
    needs: dict[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
        "source": ((), {"repo": "org/llama", "commit": commit}),
        "quantize": (("source",), dict(recipe["quantization"])),
        "inspect": (("quantize", "source"), {}),
        "gate": (("source", "quantize", "inspect"), {"policy": policy.to_json(), "claims": {}, "tasks": []}),
        "report": (("source", "quantize", "inspect", "gate"), {"name": recipe["name"]}),
    }
    made: dict[str, dict[str, Any]] = {}
    for key, (inputs, settings) in needs.items():
        made[key] = {
            "stage": key, "version": 1, "inputs": {name: fingerprint(made[name]) for name in inputs},
            "settings": dict(settings), "tools": {},
        }  # fmt: skip
    return made


def report_of(
    folder: Path, measured: Measurements, gate: Mapping[str, Any], stages: Mapping[str, StageRecord]
) -> Report:
    """What the report's stage gathers."""
    servers = {"baseline": measured.baseline, "candidate": measured.candidate}
    return Report(
        name="llama-ptpc", model="org/llama", scheme="ptpc_fp8 with an FP8 KV cache, compressed-tensors",
        created="2026-03-14T09:27:01+00:00", notes=[], stopped=None, gate=dict(gate),
        size={"baseline_bytes": measured.weights[0], "candidate_bytes": measured.weights[1], "parts": []},
        kv_tokens={}, layers=[], kv_scales=[],
        flips=[], prompts={},
        launches=[launch.to_json() for launch in measured.launches],
        stages=[
            {"name": key, "started": made.started, "seconds": 1.0, "cached": False, "fingerprint": made.fingerprint}
            for key, made in stages.items() if key != "report"
        ],
        servers=[
            {
                "side": side, "runtime": server.runtime, "version": server.version, "hardware": server.hardware,
                "device": server.device, "image": server.image, "env": dict(server.env), "argv": list(server.argv),
            }
            for side, server in servers.items()
        ],
        recipe=(folder / RECIPE).read_text(), reproduce=["quantmint run llama-ptpc"],
        versions={"quantmint": __version__}, digests={"source": "org/llama"},
    )  # fmt: skip


def facts_of(folder: Path, manifest: Manifest) -> CardFacts:
    """What the card is written from."""
    recipe = Recipe.model_validate(dict(manifest.recipe))
    config, inspection = (json.loads((folder / name).read_text()) for name in ("config.json", INSPECTED))
    report = json.loads((folder / EVIDENCE / DATA).read_text())
    repo = "my-org/llama-ptpc"
    return CardFacts(
        name="llama-ptpc", repo=repo, artefact=manifest.artefact, judged=manifest.created,
        base=card_record.card_source("org/llama", "org/llama", "c0" * 20, None, config, {"license": "apache-2.0"}),
        quantization=card_record.quantization_facts(recipe.quantization, config, inspection, None),
        terms=terms({"license": "apache-2.0"}, ()),
        launches=launches(
            recipe, workloads.load(recipe.target.workload), model_facts(folder), repo, vllm=vllm_of(report)
        ),
        report=report,
    )  # fmt: skip


def write_card(folder: Path, facts: CardFacts) -> None:
    """The card, and the facts that it is rendered from."""
    (folder / CARD).write_text(render(facts))
    (folder / CARD_FACTS).write_bytes(card_record.encode(facts, Licence(), ()))


def write_recipe(folder: Path) -> dict[str, Any]:
    """The recipe as a run resolves it; returns its content."""
    recipe = Recipe.model_validate(
        {
            "name": "llama-ptpc",
            "source": {"repo": "org/llama", "revision": "c0" * 20},
            "quantization": {"scheme": "ptpc_fp8", "kv_cache": "fp8", "format": "compressed-tensors"},
            "calibration": {"set": "tiny", "samples": 4, "sequence_length": 64},
            "evaluation": {"suite": f"{PROVEN_SUITE}/two.yaml"},
            "gate": {"throughput": {"min_ratio": None}},
        }
    )
    (folder / PROVEN_SUITE).mkdir(parents=True)
    (folder / PROVEN_SUITE / "two.yaml").write_text(SUITE)
    (folder / RECIPE).write_text(
        yaml.safe_dump(recipe.model_dump(mode="json", exclude={"tracking", "publish", "refresh"}), sort_keys=False)
    )
    loaded: dict[str, Any] = yaml.safe_load((folder / RECIPE).read_text())
    return loaded


def make(folder: Path, source: Path) -> Path:
    """Write the evidence of a checkpoint that lies in ``folder``, and the manifest over all."""
    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint

    artefact = folder_digest({path.name: (path.stat().st_size, sha256(path)) for path in folder.iterdir()})
    recipe = write_recipe(folder)
    evidence = folder / EVIDENCE
    (evidence / INSPECTION).write_text(json.dumps(_inspect(folder, source).to_json()))
    sizes = (open_checkpoint(source).nbytes, open_checkpoint(folder).nbytes)
    measured = _measurements(artefact, sizes)
    suite, read = suites.load(str(folder / PROVEN_SUITE / "two.yaml")), Recipe.model_validate(recipe)
    policy = read.gate.policy(suite, "mi300x", read.quantization.schemes)
    judged = judge(measured, policy)
    record.write(evidence, measured, judged)
    stages = {
        key: StageRecord(fingerprint(payload), 1, WHEN, WHEN, TOOLS if key == "quantize" else {}, payload)
        for key, payload in _payloads("c0" * 20, policy, recipe).items()
    }
    report_files.write(evidence, report_of(folder, measured, judged.to_json(), stages))
    manifest = Manifest(
        name="llama-ptpc", title="llama in FP8", created=WHEN, artefact=artefact, verdict="PASS",
        base=SourceRecord("org/llama", "c0" * 20, None, {path.name: sha256(path) for path in sorted(source.iterdir())}),
        recipe=recipe, recipe_fingerprint=fingerprint(recipe), stages=stages, datasets=(), tools=TOOLS,
        serving=ServingRecord("vllm 0.32.0", None),
        hardware=HardwareRecord("cpu", "AMD Instinct MI300X", "mi300x"), files={},
        quantmint=__version__,
    )  # fmt: skip
    top = {name: file for name, file in held(folder).items() if "/" not in name}
    facts = facts_of(folder, manifest)
    write_card(folder, facts)
    (folder / SBOM).write_bytes(sbom(manifest, {}, top))
    (folder / PROVENANCE).write_bytes(encode(statement(manifest, held(folder))))
    (folder / MANIFEST).write_bytes(manifests.encode(replace(manifest, files=listed(folder))))
    return folder
