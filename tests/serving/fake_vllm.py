"""A stand-in for the ``vllm`` command: a real HTTP server in a real process with a child that ignores SIGTERM.

``fake_vllm.py serve MODEL --served-model-name N --host H --port P`` behaves as the file ``fake.json`` in MODEL says:

    mode     serve (default), slow, die, hang, stubborn (serve, and ignore SIGTERM)
    seconds  before the server listens, in mode slow
    log      text to write before anything else
    code     exit code in mode die
    children what each child runs before it sleeps; [] for a server that ends at once
    devices  settings for one value of CUDA_VISIBLE_DEVICES, over the others

It writes its own pid, its children's and its environment into MODEL, for the tests to look at; the pids once more into
``pids-DEVICES.json``. With ``--headless`` it serves nothing and stays.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STUBBORN = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {extra}time.sleep(600)"


def main() -> int:
    model = Path(sys.argv[2])
    given = dict(itertools.pairwise(sys.argv[3:]))  # some flags have no value
    settings = json.loads((model / "fake.json").read_text()) if (model / "fake.json").exists() else {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    settings |= settings.get("devices", {}).get(devices, {})
    mode = settings.get("mode", "serve")
    starts = model / "starts"
    with starts.open("a") as file:
        file.write(given.get("--port", "headless") + "\n")
    (model / "environment.json").write_text(json.dumps(dict(os.environ)))
    (model / "arguments.json").write_text(json.dumps(sys.argv[1:]))
    sys.stderr.write(settings.get("log", ""))
    sys.stderr.flush()
    if mode == "die":
        return int(settings.get("code", 1))
    # One child in the group, and one that leaves it: both must go.
    children = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", STUBBORN.format(extra=extra)]).pid
        for extra in settings.get("children", ("", "os.setsid(); "))
    ]
    for name in ("pids.json", f"pids-{devices}.json"):
        (model / name).write_text(json.dumps([os.getpid(), *children]))
    if mode == "hang" or "--headless" in sys.argv:
        time.sleep(600)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(settings.get("seconds", 0))
    name = settings.get("name", given["--served-model-name"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {
                "/health": "",
                "/version": json.dumps({"version": "0.32.0+fake"}),
                "/v1/models": json.dumps({"data": [{"id": name, "root": settings.get("root", str(model))}]}),
            }
            body = pages.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_: object) -> None:
            return

    ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
