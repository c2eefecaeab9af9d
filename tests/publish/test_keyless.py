"""Signatures by an identity, as far as that goes without Sigstore: its own classes, its shipped roots, no network."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish.signing import (
    SignatureError,
    read_signature,
    require_identity,
    sign,
    verify_signature,
)
from tests.signing import WORD, write_key

WORKFLOW = "https://github.com/my-org/models/.github/workflows/publish.yml@refs/heads/main"
ISSUER = "https://token.actions.githubusercontent.com"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sigstore's public instance, as its client ships it."""
    from sigstore.models import ClientTrustConfig

    production = ClientTrustConfig.production
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(ClientTrustConfig, "production", lambda: production(offline=True))


def forged(path: Path, tmp_path: Path) -> Path:
    """A whole signature, by a certificate that its owner wrote for himself."""
    private, _ = write_key(tmp_path / "signing.pem")
    (tmp_path / "config.json").write_text("{}")
    sign("model", {"config.json": tmp_path / "config.json"}, path, key=private, passphrase=WORD)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    nobody = x509.Name([])
    issuer = b"\x0c" + bytes([len(ISSUER)]) + ISSUER.encode()
    certificate = (
        x509.CertificateBuilder(nobody, nobody, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(minutes=10))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(WORKFLOW)]), critical=True)
        .add_extension(
            x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8"), issuer), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    bundle = json.loads(path.read_text())
    raw = base64.b64encode(certificate.public_bytes(Encoding.DER)).decode()
    bundle["verificationMaterial"] = {"certificate": {"rawBytes": raw}, "tlogEntries": []}
    path.write_text(json.dumps(bundle))
    return path


def test_the_identity_is_read_and_not_believed(tmp_path: Path, offline: None) -> None:
    path = forged(tmp_path / "model.sig", tmp_path)
    signer = read_signature(path).signer
    assert signer.to_json() == {"kind": "identity", "identity": WORKFLOW, "issuer": ISSUER}
    for identity, issuer in ((WORKFLOW, "https://accounts.example.org"), ("me@example.org", ISSUER)):
        with pytest.raises(SignatureError, match="is signed by https://github"):
            verify_signature(path, identity=identity, issuer=issuer)
    with pytest.raises(SignatureError, match="was changed, or is not by https://github"):
        verify_signature(path, identity=WORKFLOW, issuer=ISSUER)
    with pytest.raises(SignatureError, match="expected the key"):
        verify_signature(path, key=tmp_path / "signing.pub")


def test_what_sigstore_is_asked_for(tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload's token goes to the real signer, which finds it malformed: nobody logs in, nothing is written."""
    from sigstore.oidc import Issuer

    asked: list[str] = []
    monkeypatch.setattr(Issuer, "__init__", lambda *arguments: None)  # asks the issuer where its pages are
    monkeypatch.setattr(Issuer, "identity_token", lambda *arguments, **options: asked.append("a browser"))
    for module in ("sigstore.oidc", "model_signing._signing.sign_sigstore.sigstore_oidc"):
        monkeypatch.setattr(f"{module}.detect_credential", lambda *client: asked.append(str(client)) or "no token")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StageError, match="Sigstore cannot be asked: Identity token is malformed"):
        sign("model", {"config.json": tmp_path / "config.json"}, tmp_path / "model.sig", key=None)
    assert asked == ["()", "('sigstore',)"]
    assert not (tmp_path / "model.sig").exists()


def test_nobody_waits_for_a_browser_on_a_machine_without_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigstore.oidc.detect_credential", lambda: None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match="no identity that Sigstore knows") as refused:
        require_identity()
    assert "id-token: write" in str(refused.value.hint)


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client, on its way to Sigstore's roots of trust."""
    import socket

    def no_network(*arguments: Any, **options: Any) -> Any:
        raise OSError("no network")

    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):  # nor roots that were fetched before
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("sigstore.oidc.detect_credential", lambda: "token")
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(StageError, match=r"Sigstore cannot be asked: .*TUF") as refused:
        require_identity()
    assert "a key needs none" in str(refused.value.hint)
    path = forged(tmp_path / "model.sig", tmp_path)
    with pytest.raises(StageError, match=r"Sigstore cannot be asked: .*TUF"):
        verify_signature(path, identity=WORKFLOW, issuer=ISSUER)
