"""The keys that sign releases: elliptic curves, PEM, the private one with a passphrase.

    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes-256-cbc -out signing.pem
    openssl pkey -in signing.pem -pubout -out signing.pub

A public key is known by the SHA-256 of its PEM text, which is what a signature holds as its hint and what
``sha256sum signing.pub`` prints. It lies beside the private key, so that a run can be planned where nobody can sign.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

PASSPHRASE: Final = "QUANTMINT_SIGNING_PASSPHRASE"  # noqa: S105 - the name of the variable
CURVES: Final = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
"""Curves that OpenSSF's model signatures allow, by their names in OpenSSL and NIST's."""
_HOW_TO = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes-256-cbc -out signing.pem"


def passphrase() -> str | None:
    """The passphrase of the private key, from the environment; None where there is none."""
    return os.environ.get(PASSPHRASE) or None


def public_path(private: Path) -> Path:
    """Where the public key of a private one lies: ``signing.pub`` beside ``signing.pem``."""
    return private.with_suffix(".pub")


def foreseen_fingerprint(private: Path) -> str | None:
    """SHA-256 of the public key that will sign, without the passphrase where it lies in the open; else None."""
    # `require_private` says what is wrong with a key, where that matters.
    with suppress(UserError):
        return public_fingerprint(public_path(private))
    with suppress(UserError):
        return private_fingerprint(private, passphrase())
    return None


def require_private(private: Path, word: str | None) -> str:
    """SHA-256 of the public key, after everything that would stop a signature was looked at.

    Raises `UserError` for a key that cannot be read or used, a passphrase that is missing or wrong, and a public key
    beside it that is another one's.
    """
    fingerprint = private_fingerprint(private, word)
    beside = public_path(private)
    if beside.exists() and public_fingerprint(beside) != fingerprint:
        raise UserError(
            f"{beside} is not the public key of {private}.",
            hint=f"openssl pkey -in {private.name} -pubout -out {beside.name}",
        )
    return fingerprint


def private_fingerprint(private: Path, word: str | None) -> str:
    """SHA-256 of the public key that belongs to a private one. Raises `UserError` that never has the passphrase."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(private, "private")
    encrypted = is_encrypted(data)
    if encrypted and word is None:
        raise UserError(f"{private} has a passphrase, but {PASSPHRASE} is not set.", hint=f"Set {PASSPHRASE}.")
    try:
        # Its own message may quote what it was given, so none of it is passed on.
        key = load_pem_private_key(data, word.encode() if encrypted and word is not None else None)
    except (ValueError, TypeError):
        if encrypted:
            raise UserError(f"{private}: the passphrase in {PASSPHRASE} is wrong, or the file is damaged.") from None
        raise UserError(
            f"{private}: expected a private key as PEM, found something else.", hint=f"Make one: {_HOW_TO}"
        ) from None
    except Exception as error:  # an algorithm that the library does not know, of whichever class it says so
        raise UserError(f"{private}: a private key of a kind that cannot sign: {type(error).__name__}.") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise _wrong_kind(private, type(key).__name__)
    return _fingerprint(private, key.public_key())


def public_fingerprint(public: Path) -> str:
    """SHA-256 of a public key's PEM text. Raises `UserError` for what is no public key on a curve that is allowed."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read(public, "public")
    try:
        key = load_pem_public_key(data)
    except Exception:  # as above
        private = b"PRIVATE KEY" in data
        raise UserError(
            f"{public}: expected a public key as PEM, found {'a private one' if private else 'something else'}.",
            hint=f"openssl pkey -in {public.name} -pubout" if private else None,
        ) from None
    if not isinstance(key, EllipticCurvePublicKey):
        raise _wrong_kind(public, type(key).__name__)
    return _fingerprint(public, key)


def is_encrypted(pem: bytes) -> bool:
    """Whether a private key's PEM text asks for a passphrase (PKCS #8, or OpenSSL's older form)."""
    return b"BEGIN ENCRYPTED PRIVATE KEY" in pem or b"Proc-Type: 4,ENCRYPTED" in pem


def _read(path: Path, kind: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: the {kind} key cannot be read: {error.strerror or error}.") from None


def _fingerprint(path: Path, key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if key.curve.name not in CURVES:
        raise UserError(
            f"{path}: found a key on the curve {key.curve.name}, expected one on {', '.join(CURVES.values())}.",
            hint=f"Make one: {_HOW_TO}",
        )
    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _wrong_kind(path: Path, found: str) -> UserError:
    name = found.lstrip("_").removesuffix("PrivateKey").removesuffix("PublicKey")
    return UserError(
        f"{path}: found a key of the kind {name}, expected one on an elliptic curve ({', '.join(CURVES.values())}).",
        hint=f"Make one: {_HOW_TO}",
    )
