"""Seven recipes over three models and a data set of the Hub's stand-in, and the commands as a person types them.

The models are the embedded one with some of its lowest bits turned, so that they know what it knows and a verdict
means something. Each recipe goes through every stage on the reference runtime, with few items and wide margins. What
two recipes have in common is made once, as in any store: some ask for a checkpoint that another one makes, and judge it
by a margin of their own or publish it elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.hub.standin import HubStandIn

MODEL = Path(__file__).parents[3] / "recipes" / "tiny" / "model"
_ROOT = str(Path(__file__).parents[3])
_CARD = b"---\nlicense: apache-2.0\n---\n# A tiny model\n"
SENTENCES = "datasets/my-org/sentences"
_TEXTS = (Path(__file__).parents[3] / "calibration" / "data" / "tiny.jsonl").read_bytes().splitlines(keepends=True)

FP8_KV = {"scheme": "ptpc_fp8", "kv_cache": "fp8", "format": "compressed-tensors"}
BLOCK = {"scheme": "fp8_block", "format": "compressed-tensors"}
MXFP4 = {"scheme": "mxfp4", "format": "quark"}
_OURS: dict[str, object] = {"set": "tiny", "samples": 8, "sequence_length": 64, "batch_size": 8}
_THEIRS: dict[str, object] = {**_OURS, "set": "../sets/sentences.yaml"}
FOLDER: dict[str, object] = {"folder": "published"}
_HUB_OF = "my-org/{}"


@dataclass(frozen=True)
class Planned:
    """A recipe of the fleet: its model, what that becomes, and what makes it differ from its neighbours."""

    base: str
    quantization: Mapping[str, object]
    hub: bool = False
    calibration: Mapping[str, object] | None = None
    margin: float = 0.2
    priority: int = 0
    seed: int = 1234
    keep: int | None = None
    schedule: str | None = None


FLEET: Mapping[str, Planned] = {
    "north-fp8kv": Planned("north", FP8_KV, calibration=_OURS, priority=1),
    "north-fp8kv-strict": Planned("north", FP8_KV, calibration=_OURS, margin=0.15),
    "north-block": Planned("north", BLOCK),
    "south-block": Planned("south", BLOCK),
    "south-block-hub": Planned("south", BLOCK, hub=True),
    "east-fp8kv": Planned("east", FP8_KV, calibration=_THEIRS),
    "east-block": Planned("east", BLOCK),
}


@dataclass(frozen=True)
class Ran:
    """How a command ended: its exit code, the JSON that it printed, what it said, and the seconds it took."""

    code: int
    answer: dict[str, Any]
    said: str
    seconds: float

    @property
    def ended(self) -> dict[str, dict[str, Any]]:
        """Of a round: how each recipe left it."""
        return {one["recipe"]: one for one in self.answer["ended"]}


def made(run: Mapping[str, Any]) -> dict[str, str]:
    """The stages that a run did not find in the store, with their fingerprints."""
    stages = run["facts"]["stages"]
    return {key: stage["fingerprint"] for key, stage in stages.items() if not stage["cached"]}


@dataclass
class World:
    """A person's folder with recipes, a store and what was published, beside a Hub; ``python`` starts the commands."""

    home: Path
    hub: HubStandIn
    python: str | Path
    environment: dict[str, str]

    @property
    def store(self) -> Path:
        return self.home / "store"

    # What somebody else does.

    def move_base(self, name: str) -> str:
        """Another commit of a model: a few more of its lowest bits turned. Returns the commit."""
        repo = f"my-org/{name}"
        known = len(self.hub.repos[repo].commits) if repo in self.hub.repos else 0
        weights = turned((MODEL / "model.safetensors").read_bytes(), seed=f"{name} {known}")
        files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
        return self.hub.put(repo, {**files, "model.safetensors": weights, "README.md": _CARD})

    def move_sentences(self, first: int) -> str:
        """Another commit of the data set, whose texts begin at another one."""
        return self.hub.put(SENTENCES, {"train.jsonl": b"".join(_TEXTS[first : first + 128])})

    # What the person does.

    def write(self, name: str, planned: Planned) -> None:
        path = self.home / "recipes" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(recipe(name, planned)), encoding="utf-8")

    def run(self, *arguments: str, python: str | Path | None = None, **variables: str) -> Ran:
        """A command with ``--json`` to its end."""
        began = time.monotonic()
        done = subprocess.run(
            [python or self.python, "-m", "quantmint", *arguments, "--json"],
            cwd=self.home,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=840,
            check=False,
        )
        seconds = time.monotonic() - began
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {}
        return Ran(done.returncode, answer, done.stderr, seconds)

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """A command that goes on while we look; what it says is in ``log``."""
        with log.open("wb") as stream:
            return subprocess.Popen(
                [self.python, "-m", "quantmint", *arguments],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    # What is there afterwards.

    def runs(self) -> dict[str, list[dict[str, Any]]]:
        """What the store says of the runs of each recipe, the oldest first."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((self.store / "runs").glob("*.json")):
            told = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(told["recipe"], []).append(told)
        return found

    def release(self, name: str) -> dict[str, Any]:
        """The manifest of what readers get."""
        manifest: dict[str, Any] = json.loads(self._manifest(name))
        return manifest

    def releases(self, names: Iterable[str]) -> dict[str, str]:
        """What readers get of each recipe, by a digest of its manifest."""
        return {name: hashlib.sha256(self._manifest(name)).hexdigest() for name in names}

    def _manifest(self, name: str) -> bytes:
        if not FLEET[name].hub:
            return (self.home / "published" / name / "quantmint.json").read_bytes()
        repo = self.hub.repo(_HUB_OF.format(name))
        return repo.objects[repo.tree(repo.find("main"))["quantmint.json"]["oid"]]

    def logs(self) -> set[str]:
        """Logs of the children that fleets have started."""
        return {path.name for path in (self.store / "refresh" / "logs").glob("*/*.log")}

    def entries(self) -> dict[str, int]:
        """Every finished stage of the store, and when it was finished (ns)."""
        found = self.store.glob("*/*/record.json")
        return {str(path.parent.relative_to(self.store)): path.stat().st_mtime_ns for path in found}


def build(home: Path, hub: HubStandIn, python: str | Path, recipes: Mapping[str, Planned] = FLEET) -> World:
    """The folder, the models that the recipes need, and the data set."""
    world = World(home, hub, python, environment(hub, home))
    for base in sorted({planned.base for planned in recipes.values()}):
        world.move_base(base)
    world.move_sentences(0)
    (home / "sets").mkdir(parents=True)
    sentences = {"name": "sentences", "description": "Texts.", "repo": SENTENCES.removeprefix("datasets/")}
    (home / "sets" / "sentences.yaml").write_text(yaml.safe_dump({**sentences, "text": "text"}), encoding="utf-8")
    for name, planned in recipes.items():
        world.write(name, planned)
    return world


def environment(hub: HubStandIn, home: Path) -> dict[str, str]:
    """That of a person whose Hub this is. One thread a process: the models are too small to share out."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "QUANTMINT_"))}
    theirs = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(home / "hf-home"), "HF_HUB_OFFLINE": "0"}
    theirs |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1,localhost"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**ours, **theirs, **threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": _ROOT}


def recipe(name: str, planned: Planned) -> dict[str, Any]:
    """The recipe as YAML has it."""
    publish = {"folder": None, "hub": {"repo": _HUB_OF.format(name)}} if planned.hub else FOLDER
    return {
        "name": name,
        "source": {"repo": f"my-org/{planned.base}"},
        "quantization": dict(planned.quantization),
        **({"calibration": dict(planned.calibration)} if planned.calibration else {}),
        "target": {"hardware": "cpu", "gpus": 1, "workload": "tiny", "max_model_len": 512},
        "evaluation": {"suite": "tiny", "runtime": "reference", "limit": 60, "looks": 1, "control": None}
        | {"seed": planned.seed},
        "gate": {
            "accuracy": {"margin": planned.margin, "margins": {"tiny_arithmetic": None}},
            "canary": {"min_agreement": 0.85, "max_kl": 0.3},
            "throughput": {"min_ratio": None},
        },
        "publish": {**publish, "keep": planned.keep},
        "refresh": {"priority": planned.priority, "schedule": planned.schedule},
    }


def turned(checkpoint: bytes, seed: str) -> bytes:
    """A safetensors file of bfloat16 with the lowest bit of a hundred of its numbers turned: other weights, as good."""
    header = 8 + int.from_bytes(checkpoint[:8], "little")
    numbers = np.frombuffer(checkpoint[header:], dtype="<u2").copy()
    generator = np.random.default_rng(list(seed.encode()))
    numbers[generator.choice(len(numbers), 100, replace=False)] ^= 1
    return checkpoint[:header] + numbers.tobytes()
