"""What is signed is what was judged: the real stage in the real runner, with keys that are made here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.manifest import (
    FileDigest,
    HardwareRecord,
    Manifest,
    ServingRecord,
    SourceRecord,
    StageRecord,
)
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE
from quantmint.pipeline.publish.signing import PASSPHRASE, verify_signature
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.preflight import require_means
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.package import SignStage, release
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job, Output, Stage
from quantmint.pipeline.store.entries import Entry
from tests.signing import WORD, rsa_key, write_key
from tests.stages.conftest import described

SIZE = 2 << 20  # bytes; more than what the store reads at every look
A = "a" * 64
WHEN = "2026-11-21T12:00:00.000Z"


@dataclass
class Leaving:
    """A stage that leaves files."""

    key: str
    work: Callable[[Job], Mapping[str, bytes]]
    needs: tuple[str, ...] = ()
    result: Mapping[str, object] = field(default_factory=dict)
    version: int = 1

    @property
    def family(self) -> str:
        return self.key

    def __getattr__(self, name: str) -> Any:
        return getattr(described(self.key), name)

    def reads(self, stage: Stage) -> bool:
        return False

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        return {need: need for need in self.needs}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        return {}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        return {}

    def run(self, job: Job) -> Output:
        for name, content in self.work(job).items():
            (job.path / name).parent.mkdir(exist_ok=True)
            (job.path / name).write_bytes(content)
        return Output(self.result, f"made {self.key}")

    def intact(self, entry: Entry, setting: Setting) -> bool:
        return True


def packaged(job: Job) -> Mapping[str, bytes]:
    """A card, and a manifest with every file that the stages before left."""
    files = {"README.md": FileDigest(3, hashlib.sha256(b"# r").hexdigest())}
    for key, entry in job.inputs.items():
        for name, fact in entry.record.files.items():
            short = name.removeprefix("checkpoint/") if key == "quantize" else f"quantmint/{name}"
            files[short] = FileDigest(fact.size, fact.sha256)
    payload = {"stage": "source", "version": 1, "inputs": {}, "settings": {"sha256": A}, "tools": {}}
    manifest = Manifest(
        name="r",
        title="t",
        created=WHEN,
        artefact=A,
        verdict="PASS",
        base=SourceRecord(None, None, A, {"config.json": A}),
        recipe={"name": "r"},
        recipe_fingerprint=fingerprint({"name": "r"}),
        stages={"source": StageRecord(fingerprint(payload), 1, WHEN, WHEN, {}, payload)},
        datasets=(),
        tools={},
        serving=ServingRecord("vllm 0.32.0", None),
        hardware=HardwareRecord(None, "AMD Instinct MI300X", "mi300x"),
        files=files,
        quantmint="0.1.0",
    )
    return {"README.md": b"# r", MANIFEST: manifests.encode(manifest)}


def stages() -> list[Any]:
    """The stages that a release comes from, and signing itself."""
    checkpoint = {"checkpoint/config.json": b"{}", "checkpoint/model.safetensors": b"w" * SIZE}
    evidence = {"gate": "gate.json", "report": "report.html", "inspect": "inspection.json"}
    passed, result = {"verdict": "PASS"}, {"identity": A, "tag": "v20261121-aaaaaaaa", "title": "t", "size": SIZE}
    return [
        Leaving("quantize", lambda job: checkpoint),
        *(Leaving(key, lambda job, name=name: {name: b"{}"}, ("quantize",), passed) for key, name in evidence.items()),
        Leaving("package", packaged, ("quantize", *evidence), result),
        SignStage(),
    ]


@pytest.fixture
def run(orchestra: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The orchestra, with a recipe whose releases are signed and a key for it."""
    monkeypatch.setenv(PASSPHRASE, WORD)
    write_key(Path("signing.pem"))
    signed_by(orchestra, "key: signing.pem")
    return orchestra


def signed_by(orchestra: Any, how: str) -> None:
    recipe = Path("r.yaml")
    plain = recipe.read_text().partition("publish:")[0]
    recipe.write_text(f"{plain}publish: {{folder: published, sign: {{{how}}}}}\n")
    orchestra.setting = replace(open_setting("r.yaml", store=orchestra.setting.store), vllm=orchestra.setting.vllm)


def released(outcome: Any) -> Any:
    keys = ("package", "quantize", "gate", "report", "inspect", "sign")
    return release({key: outcome.entry(key) for key in keys})


def test_every_file_of_the_release_is_signed(run: Any) -> None:
    outcome = run.run(*stages())
    entry = outcome.entry("sign")
    assert set(entry.record.files) == {SIGNATURE}
    files = released(outcome).files
    signed = verify_signature(files[SIGNATURE].path, key=Path("signing.pub"))
    assert signed.digests == {name: file.sha256 for name, file in files.items() if name != SIGNATURE}
    assert {"model.safetensors", "quantmint/gate.json", "README.md", MANIFEST} <= set(signed.digests)
    key = hashlib.sha256(Path("signing.pub").read_bytes()).hexdigest()
    assert entry.record.result["signer"] == {"kind": "key", "key_sha256": key}
    assert entry.record.result["identity"] == A


def test_a_signature_is_made_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run.run(*stages()).entry("sign").file(SIGNATURE).read_bytes()
    monkeypatch.delenv(PASSPHRASE)  # planned, found and published again without it
    Path("signing.pem").unlink()
    again = run.run(*stages())
    assert again.steps[-1].cached
    assert again.entry("sign").file(SIGNATURE).read_bytes() == first


def test_another_key_signs_anew_and_nothing_else_is_made_again(run: Any) -> None:
    first = run.run(*stages())
    write_key(Path("signing.pem"))
    second = run.run(*stages())
    assert [step.planned.key for step in second.steps if not step.cached] == ["sign"]
    assert released(second).identity == released(first).identity
    signatures = [outcome.entry("sign").file(SIGNATURE) for outcome in (first, second)]
    assert verify_signature(signatures[1], key=Path("signing.pub")).digests
    with pytest.raises(UserError, match="is signed by the key"):
        verify_signature(signatures[0], key=Path("signing.pub"))


def test_a_byte_that_changed_since(run: Any) -> None:
    """As a failing disk or a patient attacker leaves it: size and time are those of the record."""
    path = run.run(*stages()[:-1]).entry("quantize").file("checkpoint/model.safetensors")
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(StageError, match=r"model\.safetensors changed since it was judged and packaged") as refused:
        run.run(*stages())
    assert "--redo quantize" in str(refused.value.hint)
    assert list(run.setting.store.root.rglob(SIGNATURE)) == []
    run.run(*stages(), redo=["quantize"])
    assert len(list(run.setting.store.root.rglob(SIGNATURE))) == 1


def test_a_file_that_was_lost_is_made_again_first(run: Any) -> None:
    run.run(*stages()[:-1]).entry("quantize").file("checkpoint/model.safetensors").unlink()
    outcome = run.run(*stages())
    assert "quantize" in [step.planned.key for step in outcome.steps if not step.cached]
    assert (
        "model.safetensors" in verify_signature(outcome.entry("sign").file(SIGNATURE), key=Path("signing.pub")).digests
    )


def wrong_passphrase(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(PASSPHRASE, "wrong-word-1")


def no_passphrase(patch: pytest.MonkeyPatch) -> None:
    patch.delenv(PASSPHRASE)


def no_key(patch: pytest.MonkeyPatch) -> None:
    Path("signing.pem").unlink()


def key_of_another_kind(patch: pytest.MonkeyPatch) -> None:
    write_key(Path("signing.pem"), rsa_key())


def public_key_of_another(patch: pytest.MonkeyPatch) -> None:
    Path("signing.pub").write_bytes(write_key(Path("other.pem"))[1].read_bytes())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (wrong_passphrase, "is wrong, or the file is damaged"),
        (no_passphrase, f"{PASSPHRASE} is not set"),
        (no_key, "the private key cannot be read"),
        (key_of_another_kind, "found RSA"),
        (public_key_of_another, "is not the public key of"),
    ],
)
def test_who_cannot_sign_is_told_before_any_work(
    run: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    fault(monkeypatch)
    plan = build_plan(run.setting)
    assert [planned.key for planned in plan][-2:] == ["sign", "publish"]
    with pytest.raises(UserError, match=message) as refused:
        require_means(plan, run.setting)
    assert "wrong-word-1" not in str(refused.value)


def test_without_a_key_there_must_be_an_identity(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    signed_by(run, "keyless: true")
    monkeypatch.setattr("sigstore.oidc.detect_credential", lambda: None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match="no identity that Sigstore knows"):
        require_means(build_plan(run.setting), run.setting)


def test_a_recipe_that_asks_for_no_signature_plans_none(setting: Setting) -> None:
    assert "sign" not in [planned.key for planned in build_plan(setting)]
