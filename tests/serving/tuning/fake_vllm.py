"""A stand-in for ``vllm``: ``serve`` is a real HTTP server, ``bench serve`` writes figures that follow from its flags.

``surface.json`` in the model's folder says how:

    throughput, latency   factors by knob and value, multiplied over all that the server was started with
    fail, crash, void     knob: [values] with which the server does not start, dies when it is asked something, or logs
                          what makes a measurement void
    noise                 the largest relative error of a figure, spread over the starts of a server
    start, bench          seconds that a start and a cell take
    devices               TunableOp files that a server which tunes writes when it is asked to stop
    mute                  its answers have no text
    lose                  starts, counted from 1, whose first request is lost

Every start appends a line to ``starts`` in that folder, with the arguments and the variables that matter; every load
one to ``loads``, with its options and the number of the start; what was asked over HTTP is in ``asked``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VOID = "WARNING Using KV cache scaling factor 1.0 for fp8_e4m3. This may cause accuracy issues.\n"
CSV = """\
Validator,PT_VERSION,2.13.0
Validator,ROCM_VERSION,7.2.0
Validator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-
GemmTunableOp_BFloat16_TN,tn_4096_{device}_4096_ld_4096_4096_4096,Gemm_Hipblaslt_12,0.02
ScaledGemmTunableOp_Float8_e4m3fnuz_TN,tn_8192_16_4096_ld_4096_4096_8192,Gemm_Hipblaslt_7,0.01
"""


def knobs(argv: list[str], env: dict[str, str]) -> dict[str, str]:
    found = dict(env)
    for index, word in enumerate(argv):
        if word.startswith("--"):
            following = argv[index + 1 : index + 2]
            found[word] = following[0] if following and not following[0].startswith("--") else "on"
    return found


def serve(argv: list[str]) -> int:
    model = Path(argv[0])
    surface = json.loads((model / "surface.json").read_text())
    given = knobs(
        argv, {name: value for name, value in os.environ.items() if name.startswith(("OMP", "PYTORCH_T", "AITER"))}
    )
    with (model / "starts").open("a") as file:
        file.write(json.dumps(given) + "\n")
    number = len((model / "starts").read_text().splitlines())
    if any(given.get(knob) in values for knob, values in surface.get("fail", {}).items()):
        sys.stderr.write("ValueError: the fake does not like that value\n")
        return 1
    if any(given.get(knob) in values for knob, values in surface.get("void", {}).items()):
        sys.stderr.write(VOID)
    sys.stderr.write("INFO GPU KV cache size: 12,345 tokens\n")
    sys.stderr.flush()
    if given.get("PYTORCH_TUNABLEOP_TUNING") == "1":
        signal.signal(signal.SIGTERM, lambda *_: write_tuned(given["PYTORCH_TUNABLEOP_FILENAME"], surface))
    time.sleep(surface.get("start", 0))
    name = given["--served-model-name"]
    pages = {
        "/health": "",
        "/model": str(model),
        "/v1/models": json.dumps({"data": [{"id": name, "root": str(model)}]}),
        "/knobs": json.dumps({"knobs": given, "surface": surface, "start": number}),
    }

    crashes = any(given.get(knob) in values for knob, values in surface.get("crash", {}).items())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if crashes and self.path == "/knobs":
                sys.stderr.write("RuntimeError: the fake kernel met an illegal address\n")
                sys.stderr.flush()
                os._exit(1)
            body = pages.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with (model / "asked").open("a") as file:
                file.write(json.dumps(asked) + "\n")
            text = "" if "mute" in surface else "word " * asked["max_tokens"]
            answer = {"choices": [{"text": text}], "usage": {"completion_tokens": asked["max_tokens"]}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            return

    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
    return 0


def write_tuned(filename: str, surface: dict[str, int]) -> None:
    """What PyTorch does when a worker ends: one file a device."""
    for device in range(surface.get("devices", 1)):
        Path(filename.replace("%d", str(device))).write_text(CSV.format(device=device))
    sys.exit(0)


def bench(argv: list[str]) -> int:
    given = knobs(argv, {})
    with urllib.request.urlopen(f"{given['--base-url']}/knobs") as answer:
        server = json.load(answer)
    surface = server["surface"]
    with urllib.request.urlopen(f"{given['--base-url']}/model") as answer:
        model = Path(answer.read().decode())
    with (model / "loads").open("a") as file:
        file.write(json.dumps({**given, "start": server["start"]}) + "\n")
    sys.stdout.write("Starting main benchmark run...\n")
    time.sleep(surface.get("bench", 0))
    wobble = 1 + surface.get("noise", 0) * ((server["start"] * 7919) % 11 - 5) / 5
    speed, wait = 1000.0 * wobble, 50.0 / wobble
    for knob, values in surface.get("throughput", {}).items():
        speed *= values.get(server["knobs"].get(knob), 1.0)
    for knob, values in surface.get("latency", {}).items():
        wait *= values.get(server["knobs"].get(knob), 1.0)
    lost = int(server["start"] in surface.get("lose", []))
    prompts, length = int(given["--num-prompts"]), int(given["--random-output-len"])
    result = {
        "completed": prompts - lost,
        "failed": lost,
        "duration": prompts * length / speed,
        "total_output_tokens": prompts * length,
        "output_throughput": speed,
        "total_token_throughput": 2 * speed,
        "request_throughput": speed / length,
        "request_goodput": speed / length / 2 if "--goodput" in given else None,
        "max_concurrent_requests": int(given["--max-concurrency"]),
        "max_output_tokens_per_s": 1.5 * speed,
    }
    for name, share in (("ttft", 1.0), ("tpot", 0.1), ("itl", 0.1), ("e2el", 5.0)):
        result |= {f"p50_{name}_ms": wait * share, f"p99_{name}_ms": 2 * wait * share}
    Path(given["--result-dir"], given["--result-filename"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(bench(sys.argv[3:]) if sys.argv[1] == "bench" else serve(sys.argv[2:]))
