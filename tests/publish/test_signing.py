"""Signatures: ours check with OpenSSF's command, theirs with ours, and nothing else does."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.signing import (
    PASSPHRASE,
    SignatureError,
    check_private_key,
    expected_fingerprint,
    hash_files,
    public_fingerprint,
    read_signature,
    sign,
    verify_signature,
)
from tests.signing import WORD, curve_key, rsa_key, write_key


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a release is: files, and files in folders."""
    folder = tmp_path / "model"
    for name in ("config.json", "model.safetensors", "quantmint/samples/t.json.gz", ".eval_results/t.yaml"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100_000)
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key with a passphrase, and its public one."""
    return write_key(tmp_path / "signing.pem")


def files_of(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def signed_by(model: Path, private: Path, word: str | None = WORD) -> Path:
    signature = model / "model.sig"
    sign("model", files_of(model), signature, key=private, passphrase=word)
    return signature


def stock(*arguments: object) -> subprocess.CompletedProcess[str]:
    """OpenSSF's own command."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_ours_checks_with_the_stock_command(model: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    signature = signed_by(model, private)
    # What the Hub, git and the Hub's client put beside a release is nobody's concern.
    for name in (".gitattributes", ".cache/huggingface/download/config.json.metadata", ".git/HEAD"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text("x")
    verify = ("verify", "key", model, "--signature", signature, "--public_key", public)
    assert "succeeded" in (told := stock(*verify)).stdout, told.stderr
    (model / "extra.json").write_text("{}")
    told = stock(*verify)
    assert told.returncode != 0
    assert "extra.json" in told.stderr


def test_theirs_checks_with_ours(model: Path, tmp_path: Path) -> None:
    private, public = write_key(tmp_path / "open.pem", word=None)  # their command cannot read one with a passphrase
    expected, signature = hash_files(files_of(model), lambda _: None), model / "model.sig"
    told = stock("sign", "key", model, "--signature", signature, "--private_key", private)
    assert told.returncode == 0, told.stderr
    signed = verify_signature(signature, key=public)
    assert signed.digests == expected
    assert (signed.name, signed.signer.key_sha256) == ("model", hashlib.sha256(public.read_bytes()).hexdigest())


def test_who_signed_and_what(model: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    told: list[int] = []
    signature = model / "model.sig"
    files = files_of(model)
    made = sign("model", files, signature, key=private, passphrase=WORD, advance=told.append)
    assert sum(told) == sum(path.stat().st_size for path in files.values())
    assert made == read_signature(signature) == verify_signature(signature, key=public)
    assert made.digests == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    fingerprint = hashlib.sha256(public.read_bytes()).hexdigest()
    assert made.signer.to_json() == {"kind": "key", "key_sha256": fingerprint}
    assert fingerprint == public_fingerprint(public) == expected_fingerprint(private)


def edited(signature: Path, change: Any) -> None:
    """Change the statement that was signed."""
    bundle = json.loads(signature.read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement, bundle)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    signature.write_text(json.dumps(bundle))


def another_digest(statement: Any, bundle: Any) -> None:
    resources = statement["predicate"]["resources"]
    resources[0]["digest"] = "0" * 64
    raw = b"".join(bytes.fromhex(resource["digest"]) for resource in resources)
    statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(raw).hexdigest()


def one_file_less(statement: Any, bundle: Any) -> None:
    statement["predicate"]["resources"].pop()


def same_statement_otherwise(statement: Any, bundle: Any) -> None:
    statement["predicate"]["serialization"]["allow_symlinks"] = True


@pytest.mark.parametrize("change", [another_digest, one_file_less, same_statement_otherwise])
def test_a_statement_that_was_edited(model: Path, keys: tuple[Path, Path], change: Any) -> None:
    private, public = keys
    signature = signed_by(model, private)
    edited(signature, change)
    with pytest.raises(SignatureError, match="was changed, or is not by the key"):
        verify_signature(signature, key=public)


def test_another_signer(model: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    signature = signed_by(model, keys[0])
    other = write_key(tmp_path / "other.pem")[1]
    with pytest.raises(SignatureError, match=public_fingerprint(other)[:16]):
        verify_signature(signature, key=other)
    with pytest.raises(SignatureError, match=r"expected me@example\.org"):
        verify_signature(signature, identity="me@example.org", issuer="https://accounts.example.org")

    def claims(statement: Any, bundle: Any) -> None:
        bundle["verificationMaterial"]["publicKey"]["hint"] = public_fingerprint(other)

    edited(signature, claims)
    with pytest.raises(SignatureError):
        verify_signature(signature, key=other)
    with pytest.raises(UserError, match="against a public key, or"):
        verify_signature(signature)


def test_a_signature_that_leaves_out_the_weights(model: Path, tmp_path: Path) -> None:
    private, public = write_key(tmp_path / "open.pem", word=None)
    signature = model / "model.sig"
    weights = model / "model.safetensors"
    told = stock("sign", "key", model, "--signature", signature, "--private_key", private, "--ignore-paths", weights)
    assert told.returncode == 0, told.stderr
    with pytest.raises(SignatureError, match=r"leaves out model\.safetensors"):
        verify_signature(signature, key=public)


@pytest.mark.parametrize(
    "text", ["", "x" * 100, "[]", "{}", '{"dsseEnvelope": {"signatures": [{}], "payload": "!"}}', "[" * 100_000]
)
def test_what_is_no_signature(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.sig"
    path.write_text(text)
    with pytest.raises(SignatureError, match="not a signature"):
        read_signature(path)


def test_keys_that_cannot_sign(tmp_path: Path) -> None:
    private = tmp_path / "signing.pem"
    with pytest.raises(UserError, match="cannot be read"):
        check_private_key(private, None)
    write_key(private, rsa_key())
    with pytest.raises(UserError, match=r"expected a private key as PEM on one of the curves .*, found RSA"):
        check_private_key(private, WORD)
    write_key(private, curve_key(ec.SECP256K1()))
    with pytest.raises(UserError, match=r"secp256r1, .*, found one on the curve secp256k1"):
        check_private_key(private, WORD)
    private.write_text("-----BEGIN NOTHING-----")
    with pytest.raises(UserError, match="expected a private key as PEM"):
        check_private_key(private, WORD)


def test_the_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = write_key(tmp_path / "signing.pem")
    for word, message in ((None, f"{PASSPHRASE} is not set"), ("wrong-word-1", "is wrong, or the file is damaged")):
        with pytest.raises(UserError, match=message) as refused:
            check_private_key(private, word)
        assert "wrong-word-1" not in str(refused.value)
        assert refused.value.__cause__ is None
    assert check_private_key(private, WORD) == public_fingerprint(public)
    public.unlink()
    monkeypatch.delenv(PASSPHRASE, raising=False)
    assert expected_fingerprint(private) is None
    monkeypatch.setenv(PASSPHRASE, WORD)
    assert expected_fingerprint(private) == check_private_key(private, WORD)


def test_a_public_key_of_another(tmp_path: Path) -> None:
    private, public = write_key(tmp_path / "signing.pem")
    write_key(tmp_path / "other.pem")
    shutil.copy(tmp_path / "other.pub", public)
    with pytest.raises(UserError, match="is not the public key of") as refused:
        check_private_key(private, WORD)
    assert "openssl pkey -in signing.pem -pubout -out signing.pub" in str(refused.value.hint)
    with pytest.raises(UserError, match="found a private one"):
        public_fingerprint(private)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize(
    ("make", "word"),
    [
        ("genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes-256-cbc -pass pass:{word} -out", WORD),
        ("ecparam -name secp384r1 -genkey -noout -out", None),
        ("ecparam -name prime256v1 -genkey -out", None),
    ],
)
def test_keys_that_openssl_makes(model: Path, tmp_path: Path, make: str, word: str | None) -> None:
    """As the README says to make them."""
    private, public = tmp_path / "signing.pem", tmp_path / "signing.pub"
    arguments = [part.format(word="WORD") for part in make.split()]
    subprocess.run(["openssl", *(part.replace("WORD", word or "") for part in arguments), private], check=True)
    unlock = [] if word is None else ["-passin", f"pass:{word}"]
    subprocess.run(["openssl", "pkey", "-in", private, *unlock, "-pubout", "-out", public], check=True)
    assert check_private_key(private, WORD) == hashlib.sha256(public.read_bytes()).hexdigest()
    assert verify_signature(signed_by(model, private), key=public).signer.to_json()["kind"] == "key"
