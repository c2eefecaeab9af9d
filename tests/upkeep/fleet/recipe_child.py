"""A child of a fleet that does what it is told: ``recipe_child.py FOLDER run RECIPE ...`` reads ``FOLDER/RECIPE.json``.

That is a list with a word for each attempt, the last one for all that follow. What it did is in ``FOLDER/RECIPE.seen``.
Standard library only: it starts in some 20 ms.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ANSWERS = {"pass": 0, "fail": 1, "inconclusive": 3, "invalid": 4}
WORDS = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE", "invalid": "INVALID"}


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
    sys.stdout.flush()


def main(folder: Path, recipe: str) -> int:
    seen = folder / f"{recipe}.seen"
    attempts = seen.read_text().count("\n") if seen.exists() else 0
    plan = json.loads((folder / f"{recipe}.json").read_text())
    word, _, rest = plan[min(attempts, len(plan) - 1)].partition(" ")
    devices = os.environ.get("HIP_VISIBLE_DEVICES"), os.environ.get("CUDA_VISIBLE_DEVICES")
    with seen.open("a") as file:
        file.write(json.dumps({"began": time.monotonic(), "devices": devices, "pid": os.getpid()}) + "\n")
    sys.stderr.write("[1/2] quantize: started\n")
    sys.stderr.flush()
    match word:
        case "hang" | "stubborn":
            if word == "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", str(folder)])
            (folder / f"{recipe}.pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "transient" | "broken":
            say({"error": rest or "the Hub did not answer", "exit_code": 5, "transient": word == "transient"})
            return 5
        case "usage":
            say({"error": "wrong recipe", "exit_code": 2, "transient": False})
            return 2
        case "crash":
            sys.stderr.write(f"Traceback\nValueError: {rest}\n")
            return 1
        case "wait":
            while not Path(rest).exists():
                time.sleep(0.02)
            word = "pass"
        case "grow":
            (Path(rest) / f"{recipe}.bin").write_bytes(b"0" * 100_000)
            word = "pass"
    with (folder / f"{recipe}.ends").open("a") as file:
        file.write(f"{time.monotonic()}\n")
    (folder / f"{recipe}.done").touch()
    tag = [{"place": "here", "tag": "v20261121-00000001", "current": True}] if word == "pass" else []
    say({"verdict": WORDS[word], "reasons": [] if word == "pass" else ["lost 5 %"], "published": tag, "stages": []})
    return ANSWERS[word]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[3]))
