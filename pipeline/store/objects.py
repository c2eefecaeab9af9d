"""Read and write objects below a URL: in an S3 (or compatible), Google or Azure bucket, or a folder that machines
share.

obstore is the client: it retries requests that a busy server refused, and uploads large files in parts. Each object
carries its SHA-256 as metadata; an upload whose bytes have another digest is not completed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Final
from urllib.parse import urlsplit

from quantmint.pipeline.base.errors import QuantmintError, StageError, UserError
from quantmint.pipeline.store.files import Advance, File, judged

PART = 32 << 20
"""Bytes of a part; what fits into one is sent in one piece."""
FIRST_WAIT = timedelta(seconds=0.5)
SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
_S3: Final = ("s3", "s3a")
_PARALLEL: Final = 8  # parts on the way at a time: 256 MiB of memory
_SHA256: Final = "sha256"
_PROBE: Final = "written-and-removed"
_RIGHTS: Final = (
    "Credentials are the provider's own: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, an attached role; "
    "GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_ACCOUNT_NAME and a key. They must list, read, write and delete."
)


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a small object, and its ETag (``mark``), which changes whenever the object is written again."""

    data: bytes
    mark: str


class Objects:
    """A client for the objects below ``url``, named relative to it.

    ``endpoint`` is the address of an S3-compatible server (None: AWS_ENDPOINT_URL, or AWS itself). The constructor
    connects to nothing; it raises `UserError` for an unknown kind of URL. Methods raise `StageError` for errors that a
    retry may solve, and `UserError` for others.
    """

    def __init__(self, url: str, endpoint: str | None = None) -> None:
        self.url = url
        scheme, _, path = url.partition("://")
        if scheme not in SCHEMES:
            raise UserError(f"{url}: found {scheme}://, expected one of {', '.join(f'{kind}://' for kind in SCHEMES)}")
        if not path.strip("/"):
            raise UserError(f"{url}: found no bucket, expected {scheme}://bucket/prefix")
        if endpoint is not None and scheme not in _S3:
            raise UserError(f"{url}: found an endpoint, which only s3:// has")
        self._local = scheme == "file"
        self._endpoint = endpoint
        if scheme in _S3 and endpoint is None:
            self._endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @cached_property
    def _store(self) -> Any:
        from obstore.store import from_url

        options: dict[str, Any] = {"mkdir": True}
        if not self._local:
            options = {
                "client_options": {"allow_http": True, "connect_timeout": "10s", "timeout": "600s"},
                "retry_config": {
                    "max_retries": 5,
                    "retry_timeout": timedelta(minutes=5),
                    "backoff": {"init_backoff": FIRST_WAIT, "max_backoff": 40 * FIRST_WAIT, "base": 2},
                },
            }
        if self.url.startswith(_S3):
            options |= _of_profile() | {"checksum_algorithm": "SHA256"}
            if self._endpoint is not None:
                options["endpoint"] = self._endpoint
        with self._translating("open it"):
            return from_url(self.url, **options)

    @property
    def insecure(self) -> str | None:
        """Return the server's address if data travels to it unencrypted; None if it is encrypted or local."""
        parts = urlsplit(self._endpoint or "")
        return self._endpoint if parts.scheme == "http" and not _is_loopback(parts.hostname or "") else None

    def require_writable(self) -> None:
        """Raise unless objects can be listed, written and removed here; the probe is an object of a few bytes."""
        self.names()
        with self._translating("write"):
            _obstore().put(self._store, _PROBE, b"quantmint asks whether it may write here\n")
        with self._translating("remove"):
            _obstore().delete(self._store, _PROBE)

    def names(self) -> tuple[str, ...]:
        """Return the names of the objects directly below the URL, sorted."""
        with self._translating("list"):
            listing = _obstore().list_with_delimiter(self._store)["objects"]
            return tuple(sorted(str(item["path"]) for item in listing if item["path"] != _PROBE))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of all objects below a folder, by their names relative to it."""
        with self._translating("list"):
            listing = (item for page in _obstore().list(self._store, folder) for item in page)
            return {str(item["path"]).removeprefix(f"{folder}/"): int(item["size"]) for item in listing}

    def holds(self, name: str, file: File) -> bool:
        """Return whether an object exists with a file's size and SHA-256; one without a recorded digest is read."""
        with self._translating(f"look at {name}"):
            try:
                head = _obstore().get(self._store, name, options={"head": True})
            except FileNotFoundError:
                return False
            if head.meta["size"] != file.size:
                return False
            recorded = head.attributes.get(_SHA256)
        return (recorded or self._digest(name, file.size)) == file.sha256

    def send(self, name: str, file: File, advance: Advance) -> None:
        """Upload a file and call ``advance`` with the number of bytes as they go.

        Raises `StageError`, with no object written, if the bytes do not have the file's digest.
        """

        def pieces() -> Iterator[bytes]:
            for chunk in judged(file):
                yield chunk
                advance(len(chunk))

        with self._translating(f"write {name}"):
            _obstore().put(
                self._store,
                name,
                b"".join(pieces()) if file.size <= PART else pieces(),
                chunk_size=PART,
                max_concurrency=_PARALLEL,
                attributes=None if self._local else {_SHA256: file.sha256},
            )

    def read(self, name: str) -> Content | None:
        """Return a small object with its ETag; None if it does not exist."""
        with self._translating(f"read {name}"):
            try:
                response = _obstore().get(self._store, name)
            except FileNotFoundError:
                return None
            return Content(bytes(response.bytes()), str(response.meta["e_tag"]))

    def put_if(self, name: str, data: bytes, expected_mark: str | None) -> bool:
        """Write a small object if its ETag is still ``expected_mark`` (None: if it does not exist yet).

        Returns False, with nothing written, where another writer changed it. For a folder the check and the write are
        two steps: a writer that pauses exactly between them goes unnoticed.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        if (
            self._local
            and expected_mark is not None
            and ((now := self.read(name)) is None or now.mark != expected_mark)
        ):
            return False
        mode: Any = "create" if expected_mark is None else "overwrite" if self._local else {"e_tag": expected_mark}
        with self._translating(f"write {name}"):
            try:
                _obstore().put(self._store, name, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return False
        return True

    def pieces(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """Yield the bytes of an object of ``size`` bytes from ``start`` on; eight parts are downloaded at a time."""

        def piece(at: int) -> bytes:
            with self._translating(f"read {name}"):
                return bytes(_obstore().get_range(self._store, name, start=at, end=min(at + PART, size)))

        running: deque[Future[bytes]] = deque()
        pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="download")
        try:
            for at in range(start, size, PART):
                running.append(pool.submit(piece, at))
                if len(running) >= _PARALLEL:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def remove(self, name: str) -> None:
        """Remove an object; do nothing if it does not exist."""
        with self._translating(f"remove {name}"), suppress(FileNotFoundError):
            _obstore().delete(self._store, name)

    def remove_folder(self, folder: str) -> None:
        """Remove every object below a folder."""
        names = [f"{folder}/{name}" for name in self.sizes(folder)]
        if names:
            with self._translating(f"remove {folder}"):
                _obstore().delete(self._store, names)

    def _digest(self, name: str, size: int) -> str:
        hasher = hashlib.sha256()
        for piece in self.pieces(name, 0, size):
            hasher.update(piece)
        return hasher.hexdigest()

    @contextmanager
    def _translating(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (QuantmintError, ImportError):
            raise
        except Exception as error:  # what obstore raises has no common root with what a folder does
            if not (type(error).__module__.startswith("obstore") or isinstance(error, OSError | NotImplementedError)):
                raise
            raise _translated(error, self.url, doing) from None


def _obstore() -> Any:
    import obstore

    return obstore


def _of_profile() -> dict[str, Any]:
    """Return obstore's option for credentials of a profile in ~/.aws or of a single sign-on, through boto3.

    Empty if there are no such credentials.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return {"credential_provider": Boto3CredentialProvider()}
    except (ImportError, ValueError):  # no boto3; it finds none
        return {}


# What an answer says -> (the sentence, the hint)
_REFUSALS: Final = (
    (("169.254.169.254", "Account must be specified"), "found no credentials that could be used", _RIGHTS),
    (("NoSuchBucket", "ContainerNotFound"), "there is no such bucket", "Create it first; quantmint does not."),
    (
        ("without LOCATION", "PermanentRedirect", "AuthorizationHeaderMalformed"),
        "the bucket is in another region than the request names",
        "Set AWS_REGION to the bucket's region.",
    ),
    (("TimeTooSkewed",), "the clock of this machine is wrong, says the server", "Set it and run again."),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401 Unauthorized"),
        "the server refuses the credentials",
        _RIGHTS,
    ),
    (("403 Forbidden", "Permission denied"), "these credentials may not {doing}", _RIGHTS),
    (("certificate",), "the server's certificate is not trusted", "SSL_CERT_FILE names a file with those that are."),
)


def _translated(error: Exception, url: str, doing: str) -> QuantmintError:
    text = str(error).partition("\n\nDebug source")[0].strip()
    for marks, sentence, hint in _REFUSALS:
        if any(mark in text for mark in marks):
            return UserError(f"{url}: {sentence.format(doing=doing)}: {text}", hint=hint)
    transient = "HTTP error" in text or any(f"status code: {status}" in text for status in ("429", "5"))
    return StageError(
        f"{url}: could not {doing}: {text}",
        hint="Run the same command again: what was sent is kept.",
        transient=transient,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
