"""A file sent to S3: in one piece, or in parts of which those that arrived before are not sent again.

Every part goes with its SHA-256, which the server holds against what arrives; the SHA-256 of the whole, taken from the
same bytes, is held against the release's before the object comes into being. An upload that was cut off is gone on
with: a part that the server holds is not sent again where its ETag is the MD5 of the same bytes, which it is wherever
the server does not encrypt with a key of its own service; there all parts are sent again.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from pipeline.errors import UserError
from pipeline.publish.copying import Advance, changed, chunks
from pipeline.publish.release import File
from pipeline.publish.storage.calls import AnswerError, Calls

PART = 32 << 20  # bytes; what fits into one is sent in one piece
PARALLEL: Final = 8  # parts on the way at a time: 256 MiB of memory
MOST_PARTS: Final = 10_000
LARGEST: Final = 5 << 40  # bytes of an object
_MIB: Final = 1 << 20
SHA256: Final = "sha256"
"""Key of an object's metadata with the SHA-256 of all its bytes: the server's own is that of the parts' digests."""


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    etag: str
    digest: bytes
    size: int


def send(calls: Calls, bucket: str, key: str, file: File, advance: Advance) -> str:
    """Write a file as an object; returns the checksum that the server should say it has, in S3's own form.

    Raises `StageError` where the file's bytes are not those of its digest.
    """
    if file.size <= PART:
        return _whole(calls, bucket, key, file, advance)
    return _in_parts(calls, bucket, key, file, advance)


def abandon(calls: Calls, bucket: str, prefix: str) -> None:
    """Give up the uploads below a prefix that were never completed: their parts cost room and are seen by nobody."""
    for upload in _open(calls, bucket, prefix):
        _abort(calls, bucket, upload["Key"], upload["UploadId"])


def _whole(calls: Calls, bucket: str, key: str, file: File, advance: Advance) -> str:
    data = file.path.read_bytes()
    found = hashlib.sha256(data)
    if found.hexdigest() != file.sha256:
        raise changed(file.path, found.hexdigest(), file.sha256)
    checksum = b64encode(found.digest()).decode()
    calls(
        "put_object",
        doing=f"write {key}",
        Bucket=bucket,
        Key=key,
        Body=data,
        Metadata={SHA256: file.sha256},
        ChecksumAlgorithm="SHA256",
        ChecksumSHA256=checksum,
    )
    advance(len(data))
    return checksum


def _in_parts(calls: Calls, bucket: str, key: str, file: File, advance: Advance) -> str:
    unfinished = [upload["UploadId"] for upload in _open(calls, bucket, key) if upload["Key"] == key]
    if unfinished:
        upload = unfinished[-1]
        held = _held(calls, bucket, key, upload)
    else:
        upload, held = _begun(calls, bucket, key, file), {}
    whole, parts = hashlib.sha256(), []
    running: deque[Future[_Part]] = deque()

    def arrive() -> None:
        part = running.popleft().result()
        parts.append(part)
        advance(part.size)

    pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="upload")
    try:
        for number, data in enumerate(chunks(file.path, size=_part_size(file.size)), 1):
            whole.update(data)
            running.append(pool.submit(_part, calls, bucket, key, upload, number, data, held.get(number)))
            if len(running) >= PARALLEL:
                arrive()
        while running:
            arrive()
    finally:
        pool.shutdown(cancel_futures=True)
    if whole.hexdigest() != file.sha256:
        _abort(calls, bucket, key, upload)
        raise changed(file.path, whole.hexdigest(), file.sha256)
    _complete(calls, bucket, key, upload, parts)
    together = hashlib.sha256(b"".join(part.digest for part in parts)).digest()
    return f"{b64encode(together).decode()}-{len(parts)}"


def _part_size(size: int) -> int:
    """Bytes of a part: as many as keep the number of parts within S3's limit, in whole MiB."""
    needed = -(-size // MOST_PARTS)
    return max(PART, -(-needed // _MIB) * _MIB)


def _begun(calls: Calls, bucket: str, key: str, file: File) -> str:
    begun = calls(
        "create_multipart_upload",
        doing=f"write {key}",
        Bucket=bucket,
        Key=key,
        Metadata={SHA256: file.sha256},
        ChecksumAlgorithm="SHA256",
    )
    return str(begun["UploadId"])


def _part(calls: Calls, bucket: str, key: str, upload: str, number: int, data: bytes, held: str | None) -> _Part:
    """Send a part unless the server holds one with this MD5."""
    digest = hashlib.sha256(data).digest()
    if held is not None and held == hashlib.md5(data, usedforsecurity=False).hexdigest():
        return _Part(number, held, digest, len(data))
    answer = calls(
        "upload_part",
        doing=f"write part {number} of {key}",
        Bucket=bucket,
        Key=key,
        UploadId=upload,
        PartNumber=number,
        Body=data,
        ChecksumAlgorithm="SHA256",
        ChecksumSHA256=b64encode(digest).decode(),
    )
    return _Part(number, str(answer["ETag"]).strip('"'), digest, len(data))


def _complete(calls: Calls, bucket: str, key: str, upload: str, parts: list[_Part]) -> None:
    listed = [
        {"PartNumber": part.number, "ETag": f'"{part.etag}"', "ChecksumSHA256": b64encode(part.digest).decode()}
        for part in parts
    ]
    try:
        calls(
            "complete_multipart_upload",
            doing=f"complete {key}",
            Bucket=bucket,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": listed},
        )
    except AnswerError as error:
        # Completed before, and the answer was lost; or by another publisher of the same release. Who sent the object
        # looks at it next.
        if error.code != "NoSuchUpload":
            raise


def _open(calls: Calls, bucket: str, prefix: str) -> list[dict[str, Any]]:
    """Uploads below a prefix that were begun and not completed, the oldest first."""
    try:
        answer = calls("list_multipart_uploads", doing="list uploads", Bucket=bucket, Prefix=prefix)
    except (AnswerError, UserError):
        return []  # a right of its own, and not every server has the operation: nothing is gone on with
    return sorted(answer.get("Uploads", ()), key=lambda upload: upload["Initiated"])


def _held(calls: Calls, bucket: str, key: str, upload: str) -> dict[int, str]:
    """ETags of the parts that arrived, by their numbers."""
    found: dict[int, str] = {}
    marker = 0
    while True:
        answer = calls(
            "list_parts", doing="list parts", Bucket=bucket, Key=key, UploadId=upload, PartNumberMarker=marker
        )
        for part in answer.get("Parts", ()):
            found[part["PartNumber"]] = str(part["ETag"]).strip('"')
        if not answer.get("IsTruncated"):
            return found
        marker = answer["NextPartNumberMarker"]


def _abort(calls: Calls, bucket: str, key: str, upload: str) -> None:
    try:
        calls("abort_multipart_upload", doing="abandon an upload", Bucket=bucket, Key=key, UploadId=upload)
    except AnswerError as error:
        if error.code != "NoSuchUpload":
            raise
