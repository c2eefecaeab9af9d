"""Objects of a bucket, by S3's own operations through s3fs."""

from __future__ import annotations

import base64
import ipaddress
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from pipeline.errors import StageError, UserError
from pipeline.publish.copying import Advance
from pipeline.publish.release import File
from pipeline.publish.storage import multipart
from pipeline.publish.storage.calls import AnswerError, Calls
from pipeline.publish.storage.objects import Content, require_small

if TYPE_CHECKING:
    from s3fs import S3FileSystem

_BATCH: Final = 1000  # objects that one request removes
_KEY: Final = 1024  # bytes of an object's key
_MOVED: Final = {404, 409, 412}
_UNKNOWN: Final = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Answers of a server that does not know conditions; S3 itself gives none of them to a condition that it knows."""


class S3Objects:
    """Objects below ``bucket/prefix``; see `pipeline.publish.storage.objects.Objects`.

    ``endpoint`` None: what AWS_ENDPOINT_URL, the profile or AWS itself says. Credentials are botocore's to find.
    """

    def __init__(self, url: str, path: str, endpoint: str | None) -> None:
        self._bucket, _, prefix = path.partition("/")
        if not self._bucket:
            raise UserError(f"{url}: found no bucket, expected s3://bucket/prefix")
        self._prefix = f"{prefix}/" if prefix else ""
        self._place = url
        self._endpoint = endpoint

    @cached_property
    def _filesystem(self) -> S3FileSystem:
        from s3fs import S3FileSystem

        found = S3FileSystem(
            endpoint_url=self._endpoint,
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "retries": {"total_max_attempts": 1},
                "connect_timeout": 10,
                "read_timeout": 60,
                "max_pool_connections": 2 * multipart.PARALLEL,
                # Every server holds a signed body against its digest; few of those beside AWS know checksums in a
                # trailer, which botocore would send unasked.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "s3": {"payload_signing_enabled": True},
            },
        )
        found.retries = 1  # `Calls` repeats
        return found

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self._filesystem, self._place)

    @property
    def insecure(self) -> str | None:
        """An address with http:// that is not this machine."""
        address = str(self._calls.repeated(lambda: self._filesystem.s3.meta.endpoint_url, doing="connect"))
        parts = urlsplit(address)
        return address if parts.scheme == "http" and not _is_loopback(parts.hostname or "") else None

    def require_writable(self, sizes: Mapping[str, int]) -> None:
        """Is the bucket there, may it be listed, may an upload be begun? One is, and is abandoned at once."""
        for name, size in sizes.items():
            if len(self._key(name).encode()) > _KEY:
                raise UserError(f"{self._place}: {name}: its key has more than the {_KEY:,} bytes that S3 takes")
            if size > multipart.LARGEST:
                raise UserError(f"{self._place}: {name} has {size:,} bytes, S3 takes {multipart.LARGEST:,} an object")
        try:
            self._calls("head_bucket", doing="see the bucket", Bucket=self._bucket)
        except AnswerError as error:
            if error.status == 404:
                raise UserError(
                    f"{self._place}: there is no bucket {self._bucket}", hint="Create it first; quantmint does not."
                ) from error
            raise
        self._listed("list_objects_v2", MaxKeys=1)
        key = self._key("upload-that-is-abandoned")
        begun = self._calls("create_multipart_upload", doing="write", Bucket=self._bucket, Key=key)
        self._calls(
            "abort_multipart_upload",
            doing="abandon an upload",
            Bucket=self._bucket,
            Key=key,
            UploadId=begun["UploadId"],
        )

    def names(self) -> tuple[str, ...]:
        """Names of the objects that lie directly here."""
        return tuple(key.removeprefix(self._prefix) for key, _ in self._below(self._prefix, Delimiter="/"))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the objects below a folder, by their names in it."""
        prefix = self._key(f"{folder}/")
        return {key.removeprefix(prefix): size for key, size in self._below(prefix) if key != prefix}

    def holds(self, name: str, file: File) -> bool:
        """By the size and the SHA-256 that the server says: its own of an object in one piece, else the metadata's.

        The metadata was given when an upload began, which is completed only where the bytes had that digest.
        """
        return _is(self._head(name), file)

    def send(self, name: str, file: File, advance: Advance) -> None:
        """Upload, then ask the server what it has; where it keeps a checksum, that is compared as well."""
        checksum = multipart.send(self._calls, self._bucket, self._key(name), file, advance)
        head = self._head(name)
        said = str((head or {}).get("ChecksumSHA256", checksum))
        # Not every server writes the number of parts behind their common checksum.
        if not _is(head, file) or said.partition("-")[0] != checksum.partition("-")[0]:
            self.drop(name)
            raise StageError(
                f"{self._place}: {name} is not on the server what was sent: it says {said}, expected {checksum}",
                hint="The object was removed. Run the same command again.",
            )

    def read(self, name: str) -> Content | None:
        """A small object whole; its mark is the ETag."""

        def ask() -> tuple[bytes, str]:
            from fsspec.asyn import sync

            async def whole() -> tuple[bytes, str]:
                answer = await self._filesystem._call_s3("get_object", Bucket=self._bucket, Key=self._key(name))
                async with answer["Body"] as body:
                    require_small(self._place, name, int(answer["ContentLength"]))
                    return await body.read(), str(answer["ETag"])

            found: tuple[bytes, str] = sync(self._filesystem.loop, whole)
            return found

        try:
            return Content(*self._calls.repeated(ask, doing=f"read {name}"))
        except AnswerError as error:
            if error.status == 404:
                return None
            raise

    def replace(self, name: str, data: bytes, seen: str | None) -> bool:
        """A PUT that holds only if the object is still the one that was seen.

        A server that refuses the condition as such gets a plain PUT; the caller has just looked.
        """
        condition = {"IfNoneMatch": "*"} if seen is None else {"IfMatch": seen}
        try:
            self._put(name, data, condition)
        except AnswerError as error:
            if error.status in _MOVED:
                return False
            if error.status != 501 and error.code not in _UNKNOWN:
                raise
            self._put(name, data, {})
        return True

    def pieces(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """By ranges, of which some are on the way while one is handled."""
        path = f"{self._bucket}/{self._key(name)}"
        running: deque[Future[bytes]] = deque()

        def piece(at: int) -> bytes:
            end = min(at + multipart.PART, size)
            found: bytes = self._calls.repeated(
                lambda: self._filesystem.cat_file(path, start=at, end=end), doing=f"read {name}"
            )
            return found

        pool = ThreadPoolExecutor(multipart.PARALLEL, thread_name_prefix="download")
        try:
            for at in range(start, size, multipart.PART):
                running.append(pool.submit(piece, at))
                if len(running) >= multipart.PARALLEL:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def drop(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        self._calls("delete_object", doing=f"remove {name}", Bucket=self._bucket, Key=self._key(name))

    def clear(self, folder: str) -> None:
        """Remove everything below a folder, and halves of uploads."""
        self.tidy(folder)
        keys = [key for key, _ in self._below(self._key(f"{folder}/"))]
        for first in range(0, len(keys), _BATCH):
            batch = [{"Key": key} for key in keys[first : first + _BATCH]]
            answer = self._calls(
                "delete_objects", doing="remove", Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True}
            )
            for error in answer.get("Errors", ()):
                raise StageError(f"{self._place}: could not remove {error.get('Key')}: {error.get('Code')}")

    def tidy(self, folder: str) -> None:
        """Remove halves of uploads that nobody will go on with."""
        multipart.abandon(self._calls, self._bucket, self._key(f"{folder}/"))

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _head(self, name: str) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = self._calls(
                "head_object",
                doing=f"look at {name}",
                Bucket=self._bucket,
                Key=self._key(name),
                ChecksumMode="ENABLED",
            )
        except AnswerError as error:
            if error.status == 404:
                return None
            raise
        return found

    def _put(self, name: str, data: bytes, condition: Mapping[str, str]) -> None:
        self._calls(
            "put_object",
            doing=f"write {name}",
            Bucket=self._bucket,
            Key=self._key(name),
            Body=data,
            ContentType="application/json",
            **condition,
        )

    def _below(self, prefix: str, **options: str) -> Iterator[tuple[str, int]]:
        token: dict[str, str] = {}
        while True:
            answer = self._listed("list_objects_v2", Prefix=prefix, **options, **token)
            for found in answer.get("Contents", ()):
                yield found["Key"], found["Size"]
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def _listed(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        asked = {"Prefix": self._prefix, **arguments}
        found: Mapping[str, Any] = self._calls(operation, doing="list the bucket", Bucket=self._bucket, **asked)
        return found


def _is(head: Mapping[str, Any] | None, file: File) -> bool:
    """Whether an object is a file, by the size and the digest that the server says."""
    if head is None or head["ContentLength"] != file.size:
        return False
    said = head.get("ChecksumSHA256", "")
    if said and not _in_parts(head):
        return bool(base64.b64decode(said).hex() == file.sha256)
    return bool(head.get("Metadata", {}).get(multipart.SHA256) == file.sha256)


def _in_parts(head: Mapping[str, Any]) -> bool:
    """Whether the server's checksum is one of parts' checksums; servers say so in one of three ways."""
    return (
        head.get("ChecksumType") == "COMPOSITE" or "-" in head["ChecksumSHA256"] or "-" in str(head.get("ETag", ""))
    ) and head.get("ChecksumType") != "FULL_OBJECT"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
