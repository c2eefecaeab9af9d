"""A repository of the Hub's stand-in: commits, branches, tags and pull requests, all in memory."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from typing import Any

LARGE = ("*.safetensors", "*.bin", "*.gz", "*.zst")
_ATTRIBUTES = "".join(f"{kind} filter=lfs diff=lfs merge=lfs -text\n" for kind in LARGE)
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"

Json = dict[str, Any]
Tree = dict[str, Json]


class Refusal(Exception):  # noqa: N818 - it is an answer
    """An answer that is no success: a status, the sentence and the code that the client tells errors apart by."""

    def __init__(self, status: int, message: str, code: str | None = None, **more: object) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.more = status, message, code, more


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class Repository:
    """``commits`` by their id, each with its whole tree; ``objects`` are contents by git's hash or by SHA-256."""

    id: str
    private: bool
    gated: str | bool = False
    created: str = field(default_factory=now)
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Json] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    pulls: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record("refs/heads/main", None, {".gitattributes": self.small(_ATTRIBUTES.encode())}, "initial commit")

    def find(self, revision: str) -> str:
        """The commit that a branch, a tag, a whole ref or (seven digits of) a commit means."""
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in self.refs:
                return self.refs[name]
        if re.fullmatch("[0-9a-f]{7,40}", revision):
            for oid in self.commits:
                if oid.startswith(revision):
                    return oid
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def tree(self, commit: str) -> Tree:
        """Files by their paths; ``oid`` is the hash of git's blob, ``lfs.oid`` the SHA-256 of a large file."""
        tree: Tree = self.commits[commit]["tree"]
        return tree

    def history(self, commit: str | None) -> list[Json]:
        """Commits, the last first."""
        found = []
        while commit:
            found.append(self.commits[commit])
            commit = found[-1]["parent"]
        return found

    def small(self, content: bytes) -> Json:
        """The entry of a file that lies in git itself."""
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        self.objects[oid] = content
        return {"oid": oid, "size": len(content)}

    def large(self, sha256: str, path: str) -> Json:
        """The entry of a file that git has a pointer of."""
        if sha256 not in self.objects:
            raise Refusal(400, f"An LFS pointer pointed to a file that does not exist. Offending file: {path}")
        size = len(self.objects[sha256])
        pointer = self.small(_POINTER.format(sha256, size).encode())
        lfs = {"oid": sha256, "sha256": sha256, "size": size, "pointerSize": pointer["size"]}
        return {"oid": pointer["oid"], "size": size, "lfs": lfs}

    def record(self, ref: str, parent: str | None, tree: Tree, title: str, text: str = "") -> str:
        """One more commit on a ref."""
        oid = hashlib.sha1(f"{len(self.commits)} {self.id}".encode(), usedforsecurity=False).hexdigest()
        about = {"id": oid, "title": title, "message": text, "date": now(), "authors": [{"user": "quant"}]}
        self.commits[oid] = {**about, "parent": parent, "tree": tree}
        self.refs[ref] = oid
        return oid

    def propose(self, head: str, title: str) -> Json:
        """A pull request against main, for a commit that is on no branch."""
        pull = {"num": len(self.pulls) + 1, "title": title, "status": "open", "createdAt": now(), "events": []}
        pull |= {"isPullRequest": True, "repo": {"name": self.id, "type": "model"}, "author": {"name": "quant"}}
        pull["changes"] = {"base": "refs/heads/main"}
        self.refs[f"refs/pr/{pull['num']}"] = head
        self.pulls.append(pull)
        return pull

    def discussion(self, number: int) -> Json:
        if not 0 < number <= len(self.pulls):
            raise Refusal(404, f"Discussion {number} not found")
        return self.pulls[number - 1]

    def merged(self, number: int) -> tuple[Tree, list[str]]:
        """Main's tree with what a pull request changes, and the files that both changed apart."""
        base, head = self.history(self.refs["refs/heads/main"]), self.history(self.refs[f"refs/pr/{number}"])
        ours, theirs = base[0]["tree"], head[0]["tree"]
        start = next(commit["tree"] for commit in head if commit in base)
        changed = {name for name in start | theirs if start.get(name) != theirs.get(name)}
        apart = [name for name in sorted(changed) if ours.get(name) not in (start.get(name), theirs.get(name))]
        kept = {name: entry for name, entry in ours.items() if name not in changed}
        return kept | {name: theirs[name] for name in changed if name in theirs}, apart

    def merge(self, number: int) -> None:
        """One commit on main with all that the pull request changed, as the Hub squashes them."""
        pull, (tree, apart) = self.discussion(number), self.merged(number)
        if pull["status"] != "open":
            raise Refusal(400, f"Discussion {number} is no open pull request")
        if apart:
            raise Refusal(409, f"The pull request has conflicts: {', '.join(apart)}")
        title, parent = f"{pull['title']} (#{number})", self.refs["refs/heads/main"]
        pull["changes"]["mergeCommitId"] = self.record("refs/heads/main", parent, tree, title)
        pull["status"] = "merged"


def is_large(path: str, size: int) -> bool:
    """As the first commit's .gitattributes and the Hub's limit for other files say."""
    return size > 10**7 or any(fnmatch(path.rpartition("/")[2], kind) for kind in LARGE)
