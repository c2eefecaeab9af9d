"""A Hub of one's own: speaks to `huggingface_hub` what huggingface.co speaks, keeps everything below one folder.

    with HubStandIn(tmp_path / "hub") as hub:
        HfApi(endpoint=hub.url, token=hub.token).create_repo("my-org/model")

What it does not know it answers with 404. Large files lie at another host than the API (``localhost`` and
``127.0.0.1``), behind signed links, and that host refuses the Hub's token: as it is with the real one, without Xet.
`python -m tests.hub.standin ROOT PORT` starts it by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.hub.api import Api
from tests.hub.connection import Fault, Request
from tests.hub.repository import Json, Repository, write_json

__all__ = ["Fault", "HubStandIn", "Request"]


class HubStandIn(ThreadingHTTPServer):
    """The server, in a thread of this process. ``lfs_above`` and ``part`` are bytes, ``page`` entries of a listing."""

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0, *, page: int = 3, lfs_above: int = 10**7, part: int = 2**22) -> None:
        super().__init__(("127.0.0.1", port), Api)
        self.root, self.page, self.lfs_above, self.part = root, page, lfs_above, part
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}"
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.RLock()
        self.open: set[socket.socket] = set()
        kept = root / "hub.json"
        self.state: Json = json.loads(kept.read_text()) if kept.exists() else {"tokens": {}, "collections": {}}
        found = [Repository(path.parent) for path in root.glob("repos/*/repo.json")]
        self.repos = {repo.state["id"]: repo for repo in found}
        self.token = self.new_token("write")

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """No request after this is answered, not even on a connection that is open."""
        for fault in self.faults:
            if fault.hold:
                fault.drop = 0
                fault.hold.set()
        self.shutdown()
        self.server_close()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def new_token(self, role: str, **scoped: list[str]) -> str:
        """A token of the user: "read", "write", or "fineGrained" with the rights on each name.

        The same token for the same rights, whichever process made it: ``**{"my-org": ["repo.write"]}``.
        """
        value = "hf_" + hashlib.sha256(json.dumps([role, scoped]).encode()).hexdigest()[:34]
        self.state["tokens"][value] = {"role": role, "scoped": scoped}
        self.save()
        return value

    def repo(self, repo_id: str) -> Repository:
        """A repository as it lies on disk, for a test to look at or to change behind the client's back."""
        return self.repos[repo_id]

    def sent(self, method: str, pattern: str) -> list[Request]:
        """Requests of a method whose path the pattern is found in, in their order."""
        return [one for one in self.requests if one.method == method and re.search(pattern, one.path)]

    def save(self) -> None:
        write_json(self.root / "hub.json", self.state)

    def signed(self, path: str) -> str:
        return f"{self.storage}{path}?signature={hashlib.sha256(f'{self.root}{path}'.encode()).hexdigest()[:16]}"

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


if __name__ == "__main__":
    started = HubStandIn(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(f"{started.url} {started.token}\n")
    sys.stdout.flush()
    started.serve_forever()
