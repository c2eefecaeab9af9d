"""What a signature says: who signed, and the digest of each file. Reading it proves nothing.

    signed = read_signature(folder / "model.sig")
    signed.signer.key_sha256, signed.digests["model.safetensors"]

The file is a Sigstore bundle around an in-toto statement in a DSSE envelope, in the form of OpenSSF's model-signing.
`pipeline.publish.signing` proves that the signer signed it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.errors import UserError

_PREDICATE: Final = "https://model_signing/signature/v1.0"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 64 << 20  # bytes; a name and a digest for each of half a million files
# Object identifiers of the issuer in a certificate of Fulcio: the one in use, and the one before it.
_ISSUER, _OLD_ISSUER = "1.3.6.1.4.1.57264.1.8", "1.3.6.1.4.1.57264.1.1"


class SignatureError(UserError):
    """A signature that vouches for nothing here."""


class BrokenSignatureError(SignatureError):
    """... because it is none, or was changed after it was made."""


class OtherSignerError(SignatureError):
    """... because somebody else signed than was expected."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signed, by what the signature says: the SHA-256 of a public key, or an identity and who issued it."""

    key_sha256: str | None = None
    identity: str | None = None
    issuer: str | None = None

    @property
    def kind(self) -> str:
        """``key`` or ``identity``."""
        return "key" if self.identity is None else "identity"

    def to_json(self) -> dict[str, str]:
        """The kind, and what there is of the rest."""
        known = {"key_sha256": self.key_sha256, "identity": self.identity, "issuer": self.issuer}
        return {"kind": self.kind, **{name: value for name, value in known.items() if value is not None}}

    def __str__(self) -> str:
        if self.identity is not None:
            return f"{self.identity} ({self.issuer})"
        return f"the key {(self.key_sha256 or 'without a fingerprint')[:16]}"


@dataclass(frozen=True, slots=True)
class Signed:
    """A statement: what was signed by its name, SHA-256 of each file by its own, and the paths that were left out."""

    name: str
    signer: Signer
    digests: Mapping[str, str]
    ignored: tuple[str, ...]


def read_signature(path: Path) -> Signed:
    """Read who signed what. Raises `BrokenSignatureError` for a file that is no signature of files by SHA-256."""
    try:
        if path.stat().st_size > _LARGEST:
            raise BrokenSignatureError(f"{path}: no signature: it has {path.stat().st_size:,} bytes.")
        bundle = json.loads(path.read_bytes())
    except OSError as error:
        raise BrokenSignatureError(f"{path}: the signature cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise BrokenSignatureError(f"{path}: not a signature: {error}.") from None
    try:
        return _signed(bundle)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        fault = f"nothing at {error}" if isinstance(error, KeyError) else str(error)
        raise BrokenSignatureError(f"{path}: not a signature over a model's files: {fault}.") from None


def _signed(bundle: Mapping[str, Any]) -> Signed:
    envelope = bundle["dsseEnvelope"]
    if len(envelope["signatures"]) != 1:
        raise ValueError(f"found {len(envelope['signatures'])} signatures, expected one")
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
    return Signed(str(statement["subject"][0]["name"]), _signer(bundle["verificationMaterial"]), digests, ignored)


def _signer(material: Mapping[str, Any]) -> Signer:
    if "publicKey" in material:
        hint = material["publicKey"].get("hint")
        return Signer(key_sha256=hint if isinstance(hint, str) and _SHA256.fullmatch(hint) else None)
    chain = material["x509CertificateChain"]["certificates"] if "x509CertificateChain" in material else ()
    certificate = chain[0] if chain else material["certificate"]
    return _identity(base64.b64decode(certificate["rawBytes"], validate=True))


def _identity(der: bytes) -> Signer:
    from cryptography import x509

    found = x509.load_der_x509_certificate(der).extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    plain = [str(name.value) for name in names if isinstance(name, x509.RFC822Name | x509.UniformResourceIdentifier)]
    issuers = {
        extension.oid.dotted_string: extension.value.value
        for extension in found
        if isinstance(extension.value, x509.UnrecognizedExtension)
    }
    # A DER string: its tag, its length in one byte, its text.
    issuer = issuers[_ISSUER][2:] if _ISSUER in issuers else issuers.get(_OLD_ISSUER, b"")
    if not plain:
        raise ValueError("its certificate names nobody")
    return Signer(identity=plain[0], issuer=issuer.decode())
