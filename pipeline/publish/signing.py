"""Signatures over the files of a release, in the form of OpenSSF's model-signing.

    sign("llama-fp8", {"config.json": path, ...}, folder / "model.sig", key=Path("signing.pem"), passphrase=word)
    signed = verified(folder / "model.sig", key=Path("signing.pub"))

Anybody can check one without us: ``python -m model_signing verify key FOLDER --signature FOLDER/model.sig
--public_key signing.pub``. The library makes and proves signatures. The files are hashed here, several at once and
with their progress; and only once, as whoever verifies a release has read 140 GB of it already.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import StageError, UserError
from pipeline.publish.keys import is_encrypted, private_fingerprint, public_fingerprint
from pipeline.publish.release import SIGNATURE
from pipeline.publish.signature import BrokenSignatureError, OtherSignerError, SignatureError, Signed, read_signature
from pipeline.transience import is_transient

if TYPE_CHECKING:
    from model_signing.signing import Config as Signing

IGNORED: Final = (".cache/huggingface", ".git", ".gitattributes", ".github", ".gitignore", SIGNATURE)
"""Paths that no signature covers: itself, git's, what the Hub adds to a repository and its client to a download."""
_CHUNK = 1 << 22  # bytes
_READERS = 8  # files at once; beyond that a disk is what limits

Advance = Callable[[int], None]


def sign(
    name: str,
    files: Mapping[str, Path],
    signature: Path,
    *,
    key: Path | None,
    passphrase: str | None = None,
    advance: Advance = lambda _: None,
) -> Signed:
    """Hash the files, by their names in the release, sign that, and write ``signature``; returns what it says.

    ``key`` is a private key as PEM; None signs with the identity of this workload, or of the person at the terminal.
    Raises `UserError` for a key that cannot sign and where there is no identity, `StageError` where Sigstore cannot be
    reached.
    """
    from model_signing import signing

    config = signing.Config()
    if key is None:
        with _sigstore():
            _by_identity(config)
    else:
        private_fingerprint(key, passphrase)  # every fault of a key, in our words
        word = passphrase.encode() if passphrase is not None and is_encrypted(key.read_bytes()) else None
        # The library asks for a string and passes it on to where only bytes are taken.
        config.use_elliptic_key_signer(private_key=key, password=word)
    config.set_hashing_config(_hashing(hashed(files, advance)))
    with _sigstore() if key is None else nullcontext():
        config.sign(Path(name), signature)
    return read_signature(signature)


def verified(
    signature: Path, *, key: Path | None = None, identity: str | None = None, issuer: str | None = None
) -> Signed:
    """Prove who signed, by ``key``, a public key as PEM, or by ``identity`` and ``issuer``; returns what was signed.

    No file but the signature is read: whether they are those that were signed is for the caller to compare. Raises
    `BrokenSignatureError` and `OtherSignerError`, `SignatureError` for a signature that leaves out more than it may,
    `UserError` for a key that is none, `StageError` where Sigstore's roots cannot be fetched.
    """
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying
    from sigstore.errors import Error

    signed = read_signature(signature)
    # The library compares what it proved with this, so that no other reading of the statement gets through.
    config = verifying.Config().set_hashing_config(_hashing(signed.digests))
    if key is not None:
        found = public_fingerprint(key)
        if signed.signer.key_sha256 != found:
            raise OtherSignerError(f"{signature} is signed by {signed.signer}, expected the key {found[:16]} ({key}).")
        config.use_elliptic_key_verifier(public_key=key)
    elif identity is not None and issuer is not None:
        if (signed.signer.identity, signed.signer.issuer) != (identity, issuer):
            raise OtherSignerError(f"{signature} is signed by {signed.signer}, expected {identity} ({issuer}).")
        with _sigstore():
            config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    else:
        raise UserError("a signature is checked against a public key, or against an identity and who issued it.")
    try:
        config.verify(Path(signed.name), signature)
    except (ValueError, KeyError, TypeError, InvalidSignature, Error) as error:
        reason = f": {error}" if isinstance(error, Error) else ""
        raise BrokenSignatureError(f"{signature} was changed, or is not by {signed.signer}{reason}.") from None
    uncovered = set(signed.ignored) - set(IGNORED)
    if uncovered:
        raise SignatureError(f"{signature} leaves out {', '.join(sorted(uncovered))}, expected all files.")
    return signed


def require_identity() -> None:
    """Raise where nobody could sign without a key: no identity of this workload, no person, or no way to Sigstore."""
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
    """Turn what goes wrong between here and Sigstore into an error that says so."""
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
    """The library's hashing, for files whose digests are known."""
    from model_signing import hashing, manifest

    class Known(hashing.Config):  # type: ignore[misc]
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

    return Known()


def hashed(files: Mapping[str, Path], advance: Advance) -> dict[str, str]:
    """SHA-256 of files by their names, several at once; ``advance`` is told of the bytes."""
    lock = Lock()

    def digest(path: Path) -> str:
        found, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                found.update(buffer[:count])
                with lock:
                    advance(count)
        return found.hexdigest()

    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        return dict(zip(files, readers.map(digest, files.values()), strict=True))
