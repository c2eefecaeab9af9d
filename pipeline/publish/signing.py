"""Signatures over the files of a release in the form of OpenSSF's model-signing, and the keys.

    python -m model_signing verify key FOLDER --signature FOLDER/model.sig --public_key signing.pub

That command verifies a signature without quantmint. The library signs and verifies; this module hashes the files,
several at once and each only once. The fingerprint of a public key is the SHA-256 of its PEM text, which is the hint
in a signature and the output of ``sha256sum signing.pub``. The public key lies beside the private one, so that a
machine without the passphrase can plan a run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.transience import is_transient
from quantmint.pipeline.publish.release import SIGNATURE
from quantmint.pipeline.store.files import Advance, digest_of

if TYPE_CHECKING:
    from model_signing.signing import Config as Signing


_PREDICATE: Final = "https://model_signing/signature/v1.0"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ISSUER: Final = "1.3.6.1.4.1.57264.1.8"  # object identifier of the issuer in Fulcio's certificates


class SignatureError(UserError):
    """A signature that is unreadable, of another signer, or over other files."""


@dataclass(frozen=True, slots=True)
class Signer:
    """The signer that a signature names: the SHA-256 of a public key, or an identity with its issuer."""

    key_sha256: str | None = None
    identity: str | None = None
    issuer: str | None = None

    def to_json(self) -> dict[str, str]:
        """Return ``kind``, "key" or "identity", and the fields that are set."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return {"kind": "key" if self.identity is None else "identity", **fields}

    def __str__(self) -> str:
        if self.identity is not None:
            return f"{self.identity} ({self.issuer})"
        return f"the key {(self.key_sha256 or 'without a fingerprint')[:16]}"


@dataclass(frozen=True, slots=True)
class SignedStatement:
    """The signed statement: the release's name, the SHA-256 of each file by name, and the paths it leaves out."""

    name: str
    signer: Signer
    digests: Mapping[str, str]
    ignored: tuple[str, ...]


def read_signature(path: Path) -> SignedStatement:
    """Read a signature without verifying it. Raises `SignatureError` unless it is one of files by SHA-256."""
    try:
        return _signed(json.loads(path.read_bytes()))
    except OSError as error:
        raise SignatureError(f"{path}: the signature cannot be read: {error.strerror or error}.") from None
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        fault = f"nothing at {error}" if isinstance(error, KeyError) else str(error)
        raise SignatureError(f"{path}: not a signature over a model's files: {fault}.") from None


def _signed(bundle: Mapping[str, Any]) -> SignedStatement:
    envelope = bundle["dsseEnvelope"]
    if len(envelope["signatures"]) != 1:
        raise ValueError("found several signatures, expected one")
    statement = json.loads(base64.b64decode(envelope["payload"], validate=True))
    if statement["predicateType"] != _PREDICATE:
        raise ValueError(f"found a statement of the kind {statement['predicateType']!r}, expected {_PREDICATE}")
    how = statement["predicate"]["serialization"]
    if (how["method"], how["hash_type"]) != ("files", "sha256"):
        raise ValueError(f"found digests of {how['method']} by {how['hash_type']}, expected files by sha256")
    digests: dict[str, str] = {}
    for resource in statement["predicate"]["resources"]:
        name, digest = resource["name"], resource["digest"]
        if not isinstance(name, str) or name in digests or not _SHA256.fullmatch(digest):
            raise ValueError(f"the entry {name!r} is there twice or has no SHA-256")
        digests[name] = digest
    ignored = tuple(sorted(str(path) for path in how.get("ignore_paths", ())))
    return SignedStatement(
        str(statement["subject"][0]["name"]), _signer(bundle["verificationMaterial"]), digests, ignored
    )


def _signer(material: Mapping[str, Any]) -> Signer:
    if "publicKey" in material:
        hint = material["publicKey"].get("hint")
        return Signer(key_sha256=hint if isinstance(hint, str) and _SHA256.fullmatch(hint) else None)
    chain = material["x509CertificateChain"]["certificates"] if "x509CertificateChain" in material else ()
    certificate = chain[0] if chain else material["certificate"]
    return _identity(base64.b64decode(certificate["rawBytes"], validate=True))


def _identity(der: bytes) -> Signer:
    from cryptography import x509

    extensions = x509.load_der_x509_certificate(der).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    plain = [str(name.value) for name in names if isinstance(name, x509.RFC822Name | x509.UniformResourceIdentifier)]
    if not plain:
        raise ValueError("its certificate names nobody")
    values = [extension.value for extension in extensions if extension.oid.dotted_string == _ISSUER]
    # A DER string: its tag, its length in one byte, its text.
    issuers = [value.value[2:].decode() for value in values if isinstance(value, x509.UnrecognizedExtension)]
    return Signer(identity=plain[0], issuer=issuers[0] if issuers else "")


PASSPHRASE: Final = "QUANTMINT_SIGNING_PASSPHRASE"  # noqa: S105 - the name of the variable
CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")
"""Curves that OpenSSF's model signatures allow, by their names in OpenSSL."""
_HOW_TO = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes-256-cbc -out signing.pem"


def passphrase() -> str | None:
    """Return the private key's passphrase from the environment, or None."""
    return os.environ.get(PASSPHRASE) or None


def expected_fingerprint(private: Path) -> str | None:
    """Return the SHA-256 of the future signer's public key, from signing.pub or the private key; None without both."""
    # `check_private_key` reports a wrong key.
    with suppress(UserError):
        return public_fingerprint(private.with_suffix(".pub"))
    with suppress(UserError):
        return private_fingerprint(private, passphrase())
    return None


def check_private_key(private: Path, secret: str | None) -> str:
    """Return the SHA-256 of the public key after checking that the private key can sign.

    Raises `UserError` for a key or passphrase that does not work, and for a ``.pub`` file of another key beside it.
    """
    fingerprint = private_fingerprint(private, secret)
    public = private.with_suffix(".pub")
    if public.exists() and public_fingerprint(public) != fingerprint:
        raise UserError(
            f"{public} is not the public key of {private}.",
            hint=f"openssl pkey -in {private.name} -pubout -out {public.name}",
        )
    return fingerprint


def private_fingerprint(private: Path, secret: str | None) -> str:
    """Return the SHA-256 of a private key's public key. Raises `UserError`, whose message never has the passphrase."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(private, "private")
    encrypted = is_encrypted(data)
    if encrypted and secret is None:
        raise UserError(f"{private} has a passphrase, but {PASSPHRASE} is not set.", hint=f"Set {PASSPHRASE}.")
    try:
        # The library's message may quote the passphrase, so none of it is passed on.
        key = load_pem_private_key(data, secret.encode() if encrypted and secret is not None else None)
    except Exception:  # the class for an unknown algorithm is not documented
        if encrypted:
            raise UserError(f"{private}: the passphrase in {PASSPHRASE} is wrong, or the file is damaged.") from None
        raise _wrong_key(private, "private", "something else") from None
    return _fingerprint(private, "private", key.public_key())


def public_fingerprint(public: Path) -> str:
    """Return the SHA-256 of a public key's PEM text. Raises `UserError` unless it is a key on an allowed curve."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read(public, "public")
    try:
        key = load_pem_public_key(data)
    except Exception:  # as above
        raise _wrong_key(public, "public", "a private one" if b"PRIVATE KEY" in data else "something else") from None
    return _fingerprint(public, "public", key)


def is_encrypted(pem: bytes) -> bool:
    """Return whether a private key's PEM text needs a passphrase (PKCS #8, or OpenSSL's older form)."""
    return b"BEGIN ENCRYPTED PRIVATE KEY" in pem or b"Proc-Type: 4,ENCRYPTED" in pem


def _read(path: Path, kind: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: the {kind} key cannot be read: {error.strerror or error}.") from None


def _fingerprint(path: Path, kind: str, key: Any) -> str:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if not isinstance(key, EllipticCurvePublicKey):
        raise _wrong_key(path, kind, type(key).__name__.lstrip("_").removesuffix("PublicKey"))
    if key.curve.name not in CURVES:
        raise _wrong_key(path, kind, f"one on the curve {key.curve.name}")
    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _wrong_key(path: Path, kind: str, actual: str) -> UserError:
    return UserError(
        f"{path}: expected a {kind} key as PEM on one of the curves {', '.join(CURVES)}, found {actual}.",
        hint=f"Make one: {_HOW_TO}",
    )


IGNORED: Final = (".cache/huggingface", ".git", ".gitattributes", ".github", ".gitignore", SIGNATURE)
"""Paths that no signature covers: the signature, git's files, and those of the Hub and its client."""
_READERS = 8  # files at once; more are limited by the disk


def sign(
    name: str,
    files: Mapping[str, Path],
    signature: Path,
    *,
    key: Path | None,
    passphrase: str | None = None,
    advance: Advance = lambda _: None,
) -> SignedStatement:
    """Hash the files, by their names in the release, sign the digests, write ``signature``, and return the statement.

    ``key`` is a private key as PEM; None signs with the identity of this workload, or of the person at the terminal.
    Raises `UserError` for a key that cannot sign and without an identity, `StageError` when Sigstore is unreachable.
    """
    from model_signing import signing

    config = signing.Config()
    if key is None:
        with _sigstore():
            _by_identity(config)
    else:
        password = passphrase.encode() if passphrase is not None and is_encrypted(key.read_bytes()) else None
        # The library's annotation says str; it passes the value on to a function that takes only bytes.
        config.use_elliptic_key_signer(private_key=key, password=password)
    config.set_hashing_config(_hashing(hash_files(files, advance)))
    with _sigstore() if key is None else nullcontext():
        config.sign(Path(name), signature)
    return read_signature(signature)


def verify_signature(
    signature: Path, *, key: Path | None = None, identity: str | None = None, issuer: str | None = None
) -> SignedStatement:
    """Verify the signer by ``key``, a public key as PEM, or by ``identity`` and ``issuer``; return the statement.

    Only the signature is read; the caller compares its digests with the files. Raises `SignatureError` for another
    signer, a changed signature, and one that leaves out other paths than `IGNORED`; `UserError` for a file that is no
    public key; `StageError` when Sigstore's roots cannot be fetched.
    """
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying
    from sigstore.errors import Error

    signed = read_signature(signature)
    # The library compares the verified statement with these digests, so that no other parse of it gets through.
    config = verifying.Config().set_hashing_config(_hashing(signed.digests))
    if key is not None:
        fingerprint = public_fingerprint(key)
        if signed.signer.key_sha256 != fingerprint:
            raise SignatureError(
                f"{signature} is signed by {signed.signer}, expected the key {fingerprint[:16]} ({key})."
            )
        config.use_elliptic_key_verifier(public_key=key)
    elif identity is not None and issuer is not None:
        if (signed.signer.identity, signed.signer.issuer) != (identity, issuer):
            raise SignatureError(f"{signature} is signed by {signed.signer}, expected {identity} ({issuer}).")
        with _sigstore():
            config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    else:
        raise UserError("a signature is checked against a public key, or against an identity and who issued it.")
    try:
        config.verify(Path(signed.name), signature)
    except (ValueError, KeyError, TypeError, InvalidSignature, Error) as error:
        reason = f": {error}" if isinstance(error, Error) else ""
        raise SignatureError(f"{signature} was changed, or is not by {signed.signer}{reason}.") from None
    uncovered = set(signed.ignored) - set(IGNORED)
    if uncovered:
        raise SignatureError(f"{signature} leaves out {', '.join(sorted(uncovered))}, expected all files.")
    return signed


def require_identity() -> None:
    """Raise if keyless signing would fail: `UserError` without an identity, `StageError` without Sigstore."""
    from model_signing import signing

    with _sigstore():
        _by_identity(signing.Config())


def _by_identity(config: Signing) -> None:
    from sigstore.oidc import detect_credential

    if detect_credential() is None and not sys.stdin.isatty():
        raise UserError(
            "publish.sign.keyless: this process has no identity that Sigstore knows, and nobody is at the terminal.",
            hint="In GitHub Actions give the job `permissions: id-token: write`; else sign with a key.",
        )
    config.use_sigstore_signer(use_ambient_credentials=True)


@contextmanager
def _sigstore() -> Iterator[None]:
    """Raise errors of the connection to Sigstore as `StageError`."""
    import requests
    from id import IdentityError
    from sigstore.errors import Error
    from sigstore.oidc import IssuerError

    try:
        yield
    except (Error, IdentityError, IssuerError, requests.RequestException, OSError) as error:
        raise StageError(
            f"Sigstore cannot be asked: {str(error).strip() or type(error).__name__}.",
            hint="Signing without a key, and checking such a signature, need a network; a key needs none.",
            transient=is_transient(error),
        ) from error


def _hashing(digests: Mapping[str, str]) -> Any:
    from model_signing import hashing, manifest

    class KnownDigests(hashing.Config):  # type: ignore[misc]
        def hash(self, model_path: hashing.PathLike, *, files_to_hash: Any = None) -> manifest.Manifest:
            form = manifest.SerializationType.from_args(
                {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(IGNORED)}
            )
            items = [
                manifest.FileManifestItem(
                    path=PurePosixPath(name), digest=manifest.hashing.Digest("sha256", bytes.fromhex(digest))
                )
                for name, digest in digests.items()
            ]
            return manifest.Manifest(Path(os.fsdecode(model_path)).name, items, form)

    return KnownDigests()


def hash_files(files: Mapping[str, Path], advance: Advance) -> dict[str, str]:
    """Return the SHA-256 of files by name, hashing several at once; ``advance`` gets the numbers of bytes."""
    lock = Lock()

    def report(count: int) -> None:
        with lock:
            advance(count)

    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        return dict(zip(files, readers.map(lambda path: digest_of(path, report), files.values()), strict=True))
