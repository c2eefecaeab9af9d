"""A repository of the Hub's stand-in: git's own, with large files beside it and settings and discussions in JSON."""

from __future__ import annotations

import base64
import fnmatch
import json
import os
import re
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_ATTRIBUTES = "".join(f"*.{kind} filter=lfs diff=lfs merge=lfs -text\n" for kind in ("safetensors", "bin", "gz", "zst"))
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
_POINTS = re.compile(_POINTER.format("([0-9a-f]{64})", "([0-9]+)").encode())
_GONE = f"0 {'0' * 40}\t{{}}\0"
_COMMIT = ("id", "title", "message", "author", "date")

Json = dict[str, Any]


class Refusal(Exception):  # noqa: N818 - it is an answer
    """An answer that is no success: a status, the sentence and the code that the client tells errors apart by."""

    def __init__(self, status: int, message: str, code: str | None = None, **more: object) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.more = status, message, code, more


def write_json(path: Path, value: object) -> None:
    """The whole file or the one before it, whoever is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Repository:
    """What the client sees of a repository; every change is on disk before it is answered."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.RLock()
        self.state: Json = json.loads((folder / "repo.json").read_text(encoding="utf-8"))
        self._listings: dict[str, dict[str, Json]] = {}

    @classmethod
    def create(cls, folder: Path, repo_id: str, *, private: bool) -> Repository:
        state = {"id": repo_id, "private": private, "gated": False, "createdAt": now(), "discussions": []}
        write_json(folder / "repo.json", state)
        made = cls(folder)
        made.git("init", "-q", "--bare")
        (folder / "lfs").mkdir()
        made.record("refs/heads/main", None, [made.blob(".gitattributes", _ATTRIBUTES.encode())], "initial commit", "")
        return made

    def save(self) -> None:
        write_json(self.folder / "repo.json", self.state)

    def git(self, *arguments: str, stdin: bytes = b"") -> str:
        """What git prints; it knows no settings but these. Raises CalledProcessError."""
        return self._git(*arguments, stdin=stdin).decode()

    def _git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        who = {f"GIT_{role}_{what}": "quant" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        settings = {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "TZ": "UTC",
            "PATH": os.environ["PATH"],
        }
        command = ["git", f"--git-dir={self.folder / 'git'}", *arguments]
        return subprocess.run(command, input=stdin, env=settings | who, check=True, capture_output=True).stdout

    @property
    def refs(self) -> dict[str, str]:
        """Commits by their whole names: ``refs/heads/main``, ``refs/tags/v1``, ``refs/pr/1``."""
        lines = self.git("for-each-ref", "--format=%(refname)%00%(objectname)").splitlines()
        return dict(line.split("\0") for line in lines)

    def find(self, revision: str) -> str:
        """The commit that a branch, a tag, a whole ref or (seven digits of) a commit means."""
        refs = self.refs
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in refs:
                return refs[name]
        try:
            found = re.fullmatch("[0-9a-f]{7,40}", revision) and self.git("rev-parse", f"{revision}^{{commit}}")
        except subprocess.CalledProcessError:
            found = None
        if not found:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found.strip()

    def lfs_path(self, sha256: str) -> Path:
        return self.folder / "lfs" / sha256

    def content(self, entry: Json) -> bytes:
        if "lfs" in entry:
            return self.lfs_path(entry["lfs"]["oid"]).read_bytes()
        return self._git("cat-file", "blob", entry["oid"])

    def entries(self, commit: str) -> dict[str, Json]:
        """Files and folders by their paths, as the API tells of them; ``oid`` is git's, ``lfs.oid`` a SHA-256."""
        if commit not in self._listings:
            found: dict[str, Json] = {}
            for line in self.git("ls-tree", "-rtlz", commit).split("\0")[:-1]:
                about, path = line.split("\t")
                _, kind, oid, size = about.split()
                if kind == "tree":
                    found[path] = {"type": "directory", "path": path, "oid": oid, "size": 0}
                    continue
                found[path] = {"type": "file", "path": path, "oid": oid, "size": int(size)}
                if 120 < int(size) < 150 and (lfs := _POINTS.fullmatch(self._git("cat-file", "blob", oid))):
                    large = int(lfs[2])
                    pointer = {"oid": lfs[1].decode(), "size": large, "pointerSize": int(size)}
                    found[path] |= {"size": large, "lfs": pointer}
            self._listings[commit] = found
        return self._listings[commit]

    def tree(self, commit: str) -> dict[str, Json]:
        """The files alone."""
        return {path: entry for path, entry in self.entries(commit).items() if entry["type"] == "file"}

    def history(self, commit: str) -> list[Json]:
        """Commits, the last first."""
        shape = "--format=%H%x00%s%x00%b%x00%an%x00%cd%x1e", "--date=format:%Y-%m-%dT%H:%M:%S.000Z"
        commits = self.git("log", *shape, commit, "--").split("\x1e")[:-1]
        return [dict(zip(_COMMIT, one.strip("\n").split("\0"), strict=True)) for one in commits]

    def uses_lfs(self, path: str, commit: str) -> bool:
        """As the repository's .gitattributes say."""
        entry = self.tree(commit).get(".gitattributes")
        lines = self.content(entry).decode().splitlines() if entry else []
        patterns = [line.split()[0] for line in lines if "filter=lfs" in line.split()]
        return any(fnmatch.fnmatch(path if "/" in one else path.rpartition("/")[2], one) for one in patterns)

    def blob(self, path: str, content: bytes) -> str:
        """The line of git's index that puts it there."""
        return f"100644 {self.git('hash-object', '-w', '--stdin', stdin=content).strip()}\t{path}\0"

    def record(self, ref: str, parent: str | None, changes: list[str], title: str, message: str) -> str:
        """One more commit on a ref: the parent's tree with these lines of the index."""
        self.git("read-tree", parent or "--empty")
        self.git("update-index", "-z", "--index-info", stdin="".join(changes).encode())
        parents, words = ["-p", parent] if parent else [], f"{title}\n\n{message}".encode()
        oid = self.git("commit-tree", self.git("write-tree").strip(), *parents, stdin=words).strip()
        self.git("update-ref", ref, oid)
        return oid

    def commit(self, revision: str, header: Json, operations: list[Json], *, create_pr: bool) -> tuple[str, int | None]:
        """The commit that a request asks for, and the number of the pull request that it opened."""
        wanted, title, text = header.get("parentCommit"), header["summary"], header.get("description", "")
        with self.lock:
            parent = self.find(wanted if wanted and create_pr else revision)
            if wanted and not parent.startswith(wanted):
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            changes = [line for one in operations for line in self._changes(parent, one["key"], one["value"])]
            ref, number = revision if revision.startswith("refs/") else f"refs/heads/{revision}", None
            if create_pr:
                number = self.discuss(title, text, base=ref, status="open")
                ref = f"refs/pr/{number}"
            elif ref not in self.refs:
                raise Refusal(400, f"{revision} is neither a branch nor a pull request")
            oid = self.record(ref, parent, changes, title, text)
            if ref.startswith("refs/pr/"):
                self.event(self.discussion(int(ref.removeprefix("refs/pr/"))), "commit", subject=title, oid=oid)
            self.save()
        return oid, number

    def _changes(self, parent: str, key: str, value: Json) -> list[str]:
        path = value["path"]
        if key == "file":
            return [self.blob(path, base64.b64decode(value["content"]))]
        if key == "lfsFile":
            large = self.lfs_path(value["oid"])
            if not large.is_file():
                raise Refusal(400, f"An LFS pointer pointed to a file that does not exist. Offending file: {path}")
            return [self.blob(path, _POINTER.format(large.name, large.stat().st_size).encode())]
        gone = [one for one in self.tree(parent) if one == path or (key == "deletedFolder" and one.startswith(path))]
        if not gone:
            raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        return [_GONE.format(one) for one in gone]

    def discuss(self, title: str, text: str, *, base: str | None, status: str) -> int:
        """Open a discussion; with a ``base``, a pull request against that branch. Its number."""
        number = len(self.state["discussions"]) + 1
        one = {"num": number, "title": title, "status": status, "author": {"name": "quant"}, "createdAt": now()}
        one |= {"isPullRequest": base is not None, "repo": {"name": self.state["id"], "type": "model"}, "events": []}
        if base is not None:
            one["changes"] = {"base": base}
            self.git("update-ref", f"refs/pr/{number}", base)
        self.state["discussions"].append(one)
        self.event(one, "comment", edited=False, hidden=False, latest={"raw": text})
        return number

    def discussion(self, number: int) -> Json:
        if not 0 < number <= len(self.state["discussions"]):
            raise Refusal(404, f"Discussion {number} not found")
        one: Json = self.state["discussions"][number - 1]
        return one

    def event(self, discussion: Json, kind: str, **data: object) -> Json:
        happened = {"id": f"{len(discussion['events']):024x}", "type": kind, "createdAt": now(), "data": data}
        happened["author"] = {"name": "quant"}
        discussion["events"].append(happened)
        self.save()
        return happened

    def changed(self, pull: Json) -> tuple[list[str], list[str]]:
        """What a pull request does to its branch, as lines of the index, and the files that both changed apart."""
        base, head = self.refs[pull["changes"]["base"]], self.refs[f"refs/pr/{pull['num']}"]
        start, ours, theirs = (
            {path: one["oid"] for path, one in self.tree(commit).items()}
            for commit in (self.git("merge-base", base, head).strip(), base, head)
        )
        names = sorted(name for name in {*start, *theirs} if start.get(name) != theirs.get(name))
        apart = [name for name in names if ours.get(name) not in (start.get(name), theirs.get(name))]
        lines = [f"100644 {theirs[name]}\t{name}\0" if name in theirs else _GONE.format(name) for name in names]
        return lines, apart

    def merge(self, number: int) -> None:
        """One commit on the branch with all that the pull request changed, as the Hub squashes them."""
        with self.lock:
            pull = self.discussion(number)
            if not pull["isPullRequest"] or pull["status"] != "open":
                raise Refusal(400, f"Discussion {number} is no open pull request")
            lines, apart = self.changed(pull)
            if apart:
                raise Refusal(409, f"The pull request has conflicts: {', '.join(apart)}")
            base, title = pull["changes"]["base"], f"{pull['title']} (#{number})"
            pull["changes"]["mergeCommitId"] = self.record(base, self.refs[base], lines, title, "")
            pull["status"] = "merged"
            self.event(pull, "status-change", status="merged")
