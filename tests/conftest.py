"""Tiny real models, built once a session, and the short way from one of them to a quantized checkpoint."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.warm.shared import for_all_workers, shared_library

if TYPE_CHECKING:
    import torch

    from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan
    from quantmint.pipeline.quantize.engines.stream.shard import WrittenShard
    from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
    from quantmint.pipeline.quantize.formats.choice import Choice
    from quantmint.pipeline.quantize.model.structure import Structure

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside each other, the threads of two files' PyTorch wait for cores by spinning: it took twice the CPU time.
    # Servers choose for themselves: `child_environment` does not let it through.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

pytest_plugins = ["tests.hub.plugin", "tests.oracles", "tests.warm.plugin"]
VOCABULARY = 512
_ASSETS = Path(__file__).parent / "assets"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
_SHARD = "150KB"  # cuts the dense models into at least four files

Models = Callable[..., Path]
Quantize = Callable[..., "Made"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first: files are what is handed out, and a long one that comes last works alone."""
    weights: dict[Path, int] = {}
    for item in items:
        weight = 2 if item.get_closest_marker("vllm") else 1 if item.get_closest_marker("slow") else 0
        weights[item.path] = max(weights.get(item.path, 0), weight)
    items.sort(key=lambda item: -weights[item.path])


@pytest.fixture(autouse=True)
def _no_power_cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test takes the machine's power away: what a killed process wrote is there, and no disk is waited for.

    The engine is left as it is, which drops pages from memory and reads them from the disk again.
    """
    if "quantize" not in request.path.parts:
        monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """``models("llama")`` is a folder as `save_pretrained` writes it; with ``sharded=True`` it has an index."""
    root = tmp_path_factory.mktemp("models")

    def get(name: str, *, sharded: bool = False, dtype: str = "bfloat16") -> Path:
        folder = root / f"{name}-{'sharded' if sharded else 'single'}-{dtype}"
        if not folder.exists():
            _build(name, folder, _SHARD if sharded else "5GB", dtype)
        return folder

    return get


def _build(name: str, folder: Path, shard: str, dtype: str) -> None:
    import torch
    import transformers

    table = yaml.safe_load((_ASSETS / "models.yaml").read_text(encoding="utf-8"))
    entry = table["models"][name]
    text = {**table["common"], **entry.get("text", {})}
    fields = (
        {"text_config": {**text, "dtype": dtype}, **entry["fields"]} if "text" in entry else {**text, **entry["fields"]}
    )
    config = getattr(transformers, entry["config"])(**fields, dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(name.encode()))
        model = getattr(transformers, entry["model"])(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for parameter in model.parameters():
                # Wider than the usual initialisation, and no two rows alike: scales must differ to be told apart.
                if parameter.ndim >= 2:
                    parameter.mul_(3 * torch.rand(parameter.shape[:-1]).add_(0.5).unsqueeze(-1))
        for name, kept in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                kept.data = kept.data.float()  # as in DeepSeek's releases
    model.save_pretrained(folder, max_shard_size=shard)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(kinds.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w3"
    )


@pytest.fixture(scope="session")
def blocks() -> torch.Tensor:
    """Calibration tokens: int64 [16, 64]."""
    import torch

    return torch.randint(4, VOCABULARY, (16, 64), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Made:
    """A quantized checkpoint with everything that it was made from."""

    source: Checkpoint
    structure: Structure
    choice: Choice
    plans: tuple[ShardPlan, ...]
    written: tuple[WrittenShard, ...]
    folder: Path
    expected_scales: Mapping[str, float]

    @property
    def checkpoint(self) -> Checkpoint:
        """The result, read anew."""
        from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint

        return open_checkpoint(self.folder)


@pytest.fixture(scope="session")
def quantize(models: Models, blocks: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """A model by its name, in any scheme and either layout; made once: copy it before you break it.

    PTPC-FP8 with a calibrated FP8 cache where nothing else is asked for.
    """
    from quantmint.calibration.ranges import Ranges
    from quantmint.calibration.replica import load_resident
    from tests.measuring import observe

    known: dict[tuple[object, ...], Made] = {}
    measured: dict[str, Ranges] = {}

    def make(
        name: str, checkpoint_format: str, *, sharded: bool = False, kv_cache: bool = True, scheme: str = "ptpc_fp8"
    ) -> Made:
        from quantmint.pipeline.base.schemes import table

        key = (name, checkpoint_format, sharded, kv_cache, scheme)
        if key not in known:
            needed = kv_cache or table()[scheme].needs_ranges
            if needed and name not in measured:
                measured[name] = observe(load_resident(models(name), "cpu"), blocks.split(4))
            destination = tmp_path_factory.mktemp(f"{name}-{checkpoint_format}-{scheme}")
            ranges = measured[name] if needed else None
            folder = models(name, sharded=sharded)
            known[key] = _make(folder, checkpoint_format, ranges, destination, scheme, kv_cache)
        return known[key]

    return make


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Made]:
    """``make_checkpoint(folder, format, ranges or None, destination, scheme="ptpc_fp8")``: quantize any folder."""
    return _make


def _make(
    folder: Path,
    checkpoint_format: str,
    ranges: Any,
    destination: Path,
    scheme: str = "ptpc_fp8",
    kv_cache: bool | None = None,
) -> Made:

    import torch

    from quantmint.pipeline.quantize.engines.stream.engine import (
        CheckpointPlan,
        scale_ranges,
        static_scale,
        write_checkpoint,
    )
    from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
    from quantmint.pipeline.quantize.formats.choice import Choice
    from quantmint.pipeline.quantize.model.reader import read_structure

    source = open_checkpoint(folder)
    structure = read_structure(folder, source.tensors)
    cached = ranges is not None if kv_cache is None else kv_cache
    choice = Choice(dict.fromkeys(structure.linear, scheme), structure.kept, cached)
    plans = plan_shards(source, structure, choice, checkpoint_format)
    static = {} if ranges is None else scale_ranges(ranges, choice, checkpoint_format)
    types = torch.bfloat16, torch.bfloat16  # of scales, and of the model
    expected = {name: float(static_scale(name.rpartition(".")[2], amax, *types)) for name, amax in static.items()}
    written = write_checkpoint(
        CheckpointPlan(source, plans, choice, static, checkpoint_format=checkpoint_format),
        destination / "checkpoint",
        manifest=destination / "manifest.jsonl",
    )
    return Made(source, structure, choice, plans, written.shards, destination / "checkpoint", expected)


@pytest.fixture(scope="session")
def by_llmcompressor(
    models: Models, blocks: torch.Tensor, tmp_path_factory: pytest.TempPathFactory, warm_library: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Checkpoints that llm-compressor made, all in one process at the first use by any worker."""
    root, ids = for_all_workers(tmp_path_factory, "by-llmcompressor"), blocks.tolist()

    def job(out: str, model: str, scheme: str, rows: list[list[int]], batch_size: int) -> dict[str, Any]:
        return {
            "source": str(models(model)),
            "out": str(root / out),
            "scheme": scheme,
            "kv_cache": len(rows) == len(ids),
            "ids": rows,
            "batch_size": batch_size,
        }

    def get(name: str) -> Path:
        jobs = [
            job("ptpc_fp8-kv", "llama", "FP8_DYNAMIC", ids, 4),
            job("ptpc_fp8-kv-one-by-one-backwards", "llama", "FP8_DYNAMIC", ids[::-1], 1),
            job("ptpc_fp8-kv-qwen3", "qwen3", "FP8_DYNAMIC", ids, 4),
            job("ptpc_fp8-kv-qwen3-moe", "qwen3-moe", "FP8_DYNAMIC", ids, 4),
            job("fp8-kv", "llama", "FP8", ids, 4),
            job("fp8_block", "llama", "FP8_BLOCK", ids[:2], 2),
            job("mxfp4", "llama", "MXFP4", ids[:2], 2),
            job("mxfp4_weight_only", "llama", "MXFP4A16", ids[:2], 2),
            job("w4a16", "llama", "W4A16", ids[:2], 2),
            job("int8_w8a8", "llama", "INT8", ids[:2], 2),
            job("mxfp8", "llama", "MXFP8", ids[:2], 2),
            job("nvfp4", "llama", "NVFP4", ids, 4),
            job("nvfp4_weight_only", "llama", "NVFP4A16", ids[:2], 2),
        ]
        _by_library("llmcompressor", warm_library, jobs, root)
        return root / name

    return get


@pytest.fixture(scope="session")
def by_quark(
    models: Models, blocks: torch.Tensor, tmp_path_factory: pytest.TempPathFactory, warm_library: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Checkpoints that amd-quark made, all in one process at the first use by any worker."""
    root = for_all_workers(tmp_path_factory, "by-quark")

    def job(out: str, scheme: str, *, model: str = "llama", kv_cache: bool = False, file: bool = False) -> Any:
        return {
            "source": str(models(model)),
            "out": str(root / out),
            "scheme": scheme,
            "kv_cache": kv_cache,
            "ids": blocks.tolist(),
            "model_type": model,
            "from_file": file,
        }

    def get(name: str) -> Path:
        jobs = [
            job("ptpc_fp8-kv", "ptpc_fp8", kv_cache=True),
            job("ptpc_fp8-kv-qwen3", "ptpc_fp8", model="qwen3", kv_cache=True),
            job("fp8-kv", "fp8", kv_cache=True),
            *(
                job(scheme, scheme)
                for scheme in ("mxfp4", "mxfp4_weight_only", "mxfp4_fp8", "mxfp6_e2m3", "mxfp6_e3m2")
            ),
            *(job(f"file-{scheme}", scheme, file=True) for scheme in ("fp8", "ptpc_fp8")),
        ]
        _by_library("quark", warm_library, jobs, root)
        return root / name

    return get


@pytest.fixture(scope="session")
def warm_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """``warm_library("quark")`` is a Python whose programs are forks of one process that has imported that library.

    `test_a_run_with_the_real_library` starts both as users do.
    """
    with ExitStack() as stack:
        known: dict[str, Path] = {}

        def get(engine: str) -> Path:
            if find_spec(engine) is None:
                pytest.skip(f"{engine} is not installed")
            if engine not in known:
                folder = for_all_workers(tmp_path_factory, f"warm-{engine}")
                known[engine] = stack.enter_context(shared_library(folder, engine))
            return known[engine]

        yield get


def _by_library(engine: str, warm_library: Callable[[str], Path], jobs: list[dict[str, Any]], root: Path) -> None:
    """Run the jobs, unless that was tried already; one worker does, the others wait for it."""
    python = warm_library(engine)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "jobs.json").exists():
            _run_jobs([python, "-m", f"tests.quantize.oracles.with_{engine}"], jobs, root)


def _run_jobs(command: list[str | Path], jobs: list[dict[str, Any]], root: Path) -> None:
    (root / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    finished = subprocess.run(
        [*command, root / "jobs.json"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """A ``quantization_config`` that a reference library wrote, by its file's stem."""
    folder = _ASSETS / "golden"
    return lambda name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a window, which writes down what its console says and what it asks the network for."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no Chromium or no chromedriver on PATH")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1100,900",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def forked() -> Callable[[Callable[[], None]], int]:
    """Start a function in a process of its own; returns its number."""

    def start(function: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                function()
                code = 0
            finally:
                os._exit(code)
        return pid

    return start


@pytest.fixture
def code_of() -> Callable[[int], int]:
    """Wait for a process; minus the signal where one ended it."""
    return lambda pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_self() -> None:
    """What no process survives, and none can tidy up after."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def die() -> Callable[[], None]:
    return kill_self


@pytest.fixture(scope="session")
def zoo_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the models of `tests.zoo`, and of what is made of them: one for all test processes."""
    return for_all_workers(tmp_path_factory, "zoo")


@pytest.fixture(scope="session")
def zoo(zoo_root: Path) -> Callable[..., Path]:
    """``zoo("qwen3_next")`` is the folder of a tiny model of `tests.zoo`; each is built once."""

    def get(name: str, *, dtype: str = "bfloat16") -> Path:
        from tests.zoo.matrix import source

        return source(name, zoo_root, dtype=dtype)

    return get


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six layers, in one file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(config).bfloat16()
    folder = tmp_path_factory.mktemp("deep")
    model.save_pretrained(folder)
    return folder
