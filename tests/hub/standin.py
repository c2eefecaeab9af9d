"""A Hub of one's own: speaks to `huggingface_hub` what huggingface.co speaks, and keeps everything in memory.

    with HubStandIn() as hub:
        HfApi(endpoint=hub.url, token=hub.token).create_repo("my-org/model")

What it does not know it answers with 404. Large files lie at another host than the API (``localhost`` and
``127.0.0.1``), behind signed links, and that host refuses the Hub's token: as it is with the real one, without Xet.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from http.server import ThreadingHTTPServer

from tests.hub import datasets as datasets  # adds their addresses
from tests.hub.api import Api
from tests.hub.connection import Fault, Request
from tests.hub.repository import Json, Repository, is_large

__all__ = ["Fault", "HubStandIn", "Request"]


class HubStandIn(ThreadingHTTPServer):
    """The server, in a thread of this process. ``part`` is in bytes, ``page`` in entries of a listing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Api)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}"
        self.page, self.part = 3, 2**22
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.tokens: dict[str, Json] = {}
        self.repos: dict[str, Repository] = {}
        self.collections: dict[str, Json] = {}
        self.token = self.new_token("write")

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for fault in self.faults:
            if fault.hold:
                fault.drop = 0
                fault.hold.set()
        self.shutdown()
        self.server_close()

    def new_token(self, role: str, **scoped: list[str]) -> str:
        """A token of the user: "read", "write", or "fineGrained" with the rights on each name."""
        value = f"hf_{len(self.tokens):034d}"
        self.tokens[value] = {"role": role, "scoped": scoped}
        return value

    def repo(self, repo_id: str) -> Repository:
        """A repository as it is, for a test to look at."""
        return self.repos[repo_id]

    def put(self, repo_id: str, files: Mapping[str, bytes], title: str = "files") -> str:
        """A commit on main, as somebody else makes it; the repository is made if need be. Returns the commit.

        A dataset is called ``datasets/namespace/name``.
        """
        with self.lock:
            repo = self.repos.setdefault(repo_id, Repository(repo_id, private=False))
            head = repo.find("main")
            tree = dict(repo.tree(head))
            for path, content in files.items():
                if is_large(path, len(content)):
                    sha256 = hashlib.sha256(content).hexdigest()
                    repo.objects[sha256] = content
                    tree[path] = repo.large(sha256, path)
                else:
                    tree[path] = repo.small(content)
            return repo.record("refs/heads/main", head, tree, title)

    def sent(self, method: str, pattern: str) -> list[Request]:
        """Requests of a method whose path the pattern is found in, in their order."""
        return [one for one in self.requests if one.method == method and re.search(pattern, one.path)]

    def signed(self, path: str) -> str:
        """A link of the storage that needs no token."""
        return f"{self.storage}{path}?signature={hashlib.sha256(f'{self.token}{path}'.encode()).hexdigest()[:16]}"

    def fault_of(self, method: str, path: str) -> Fault | None:
        """What is to go wrong with this request."""
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None
