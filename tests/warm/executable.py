"""Executables whose programs start as forks of one process that has imported the libraries already.

    with warm_python(folder, environment) as python:
        subprocess.run([python, "-m", "quantmint", "requantize", "--due"])
    with warm_vllm(folder, find_vllm()) as vllm:
        subprocess.run([vllm.executable, "serve", ...])

A dozen recipes make half a hundred programs, each of which imports PyTorch and transformers for longer than it then
computes for a tiny model, and a server of one takes less to answer than vLLM to import. What runs is the program all
the same: its own process, session, arguments, environment, folder and files.

The executable is a small script that waits for the fork: signals go through it, and the fork ends with it, by SIGKILL
where it was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantmint.pipeline.serving.environment import VllmEnvironment

_LIBRARIES = (
    "torch", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "transformers.masking_utils", "transformers.core_model_loading",
    "transformers.conversion_mapping", "tokenizers", "safetensors.torch", "datasets", "lm_eval.tasks",
    "lm_eval.evaluator", "lm_eval.models.openai_completions", "scipy.stats", "matplotlib.pyplot",
    "matplotlib.backends.backend_svg", "huggingface_hub.hf_api", "jinja2", "pydantic", "cyclonedx.model.bom",
    "cyclonedx.output.json", "detect_secrets.core.scan", "tenacity", "rich.progress", "httpx",
    # Ours take a second as well: models of pydantic, tables.
    "quantmint.pipeline.commands.cli", "quantmint.pipeline.commands.requantize", "quantmint.pipeline.commands.run",
    "quantmint.pipeline.runs.runner", "quantmint.pipeline.runs.session", "quantmint.pipeline.runs.planner",
    "quantmint.pipeline.runs.preflight", "quantmint.pipeline.upkeep.due.due",
    "quantmint.pipeline.upkeep.fleet.rounds",
    "quantmint.pipeline.upkeep.notices", "quantmint.pipeline.quantize.engines.stream.engine",
    "quantmint.pipeline.quantize.inspection.inspect",
    "quantmint.pipeline.publish.addresses", "quantmint.pipeline.publish.hub.destination",
    "quantmint.pipeline.publish.card",
    "quantmint.pipeline.publish.provenance", "quantmint.pipeline.publish.screening",
    "quantmint.pipeline.serving.reference.lm",
    "quantmint.calibration.calibrate", "quantmint.eval.report.page",
    "quantmint.eval.report.plots", "quantmint.eval.harness_client",
)  # fmt: skip
_VLLM = (
    "vllm.entrypoints.cli.serve", "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.collect_env", "vllm.entrypoints.cli.download_kernels", "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai", "vllm.entrypoints.cli.preload", "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.snapshot", "vllm.entrypoints.cli.benchmark.serve", "vllm.benchmarks.serve",
    "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router", "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.scale_out.factories", "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router", "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.elastic_ep.api_router", "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics", "vllm.plugins.lora_resolvers.hf_hub_resolver", "vllm.renderers.hf",
    "vllm.tokenizers.hf", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama", "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.quark.quark", "vllm._custom_ops", "uvicorn.protocols.http.httptools_impl",
    "uvicorn.lifespan.on", "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router", "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.models.api_router", "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router", "vllm.entrypoints.serve.instrumentator.offline_docs",
    "vllm.entrypoints.serve.lora.api_router", "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.utils.fingerprint", "vllm.entrypoints.serve.utils.orca_metrics",
    "vllm.entrypoints.serve.utils.sse_keep_alive", "model_hosting_container_standards.sagemaker",
    "uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto",
)  # fmt: skip
_FORKS = Path(__file__).with_name("forks.py")
_PROCESSES: dict[str, int] = {}
"""The process that forks, by its executable."""
# What it was called with goes to the socket, with its files; what comes back is how the fork ended.
_FORKED = """
content = json.dumps({**asked, "parent": os.getppid()}).encode()
socket.send_fds(line, [len(content).to_bytes(4, "big")], asked["numbers"])
line.sendall(content)
os.close(0)  # who waits for the end of a pipe waits for the fork's end of it alone
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: line.send(bytes([number])))
answer = b""
while len(answer) < 4:
    part = line.recv(4 - len(answer))
    if not part:
        os._exit(70)
    answer += part
status = int.from_bytes(answer, "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""
_PYTHON_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
arguments = sys.argv[1:]
if arguments[:1] == ["-P"]:
    arguments = arguments[1:]
if arguments[:1] != ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
line = socket.socket(socket.AF_UNIX)
line.connect({place!r})
asked = {{"arguments": arguments[1:], "environment": dict(os.environ), "folder": os.getcwd(), "numbers": [0, 1, 2]}}
"""
# First it asks where the process of its variables is.
_ASKING = """
with socket.socket(socket.AF_UNIX) as line:
    line.connect({place!r})
    line.sendall(json.dumps(environment, sort_keys=True).encode())
    line.shutdown(socket.SHUT_WR)
    place = line.recv(4096)
line = socket.socket(socket.AF_UNIX)
line.connect(place)
asked = {{"arguments": arguments, "environment": environment, "folder": os.getcwd(), "numbers": numbers}}
"""
_VLLM_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
arguments, numbers = ["vllm.entrypoints.cli.main", *sys.argv[1:]], [0, 1, 2]
ours = {{"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "HF_XET_HIGH_PERFORMANCE"}}
environment = {{
    name: value for name, value in os.environ.items() if name not in ours and not name.startswith("PYTEST_")
}}
environment |= {{"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}}
"""
# What multiprocessing spawns is told its files by their numbers.
_SPAWNED_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
arguments = sys.argv[1:]
if arguments[-1:] != ["--multiprocessing-fork"] and not (arguments and arguments[0].endswith(".py")):
    os.execv({vllm!r}, [{vllm!r}, *arguments])
environment = dict(os.environ)
numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{{number}}")]
"""


@contextlib.contextmanager
def warm_python(folder: Path, environment: Mapping[str, str], *modules: str) -> Iterator[Path]:
    """The executable, for as long as the block runs; what still runs then is killed.

    Where modules are named they alone are imported, in their order.

    Only the settings that a library reads while it is imported are those of ``environment``, and not of the program.
    Programs that are started by `sys.executable` are forks as well. ``-c``, and what is started with ``-I``, is left to
    the real interpreter.
    """
    place, script = folder / "warm.socket", folder / "python"
    root = str(Path(__file__).parents[2])
    variables = {**environment, "PYTHONPATH": root}
    with _warm(sys.executable, place, str(script), modules or _LIBRARIES, variables, root) as process:
        _executable(script, _PYTHON_SCRIPT.format(python=sys.executable, place=str(place)) + _FORKED)
        _PROCESSES[str(script)] = process.pid
        yield script


@contextlib.contextmanager
def warm_vllm(folder: Path, vllm: VllmEnvironment) -> Iterator[VllmEnvironment]:
    """An environment with a ``vllm`` of forks, for as long as the block runs.

    Scripts that its ``python`` runs by their path are forks as well; else it is the real one.

    There is one process that has imported vLLM for each set of variables that programs are started with, made for the
    first of them: whatever is read while vLLM is imported or loaded is what it would be. Only which test runs is kept
    from a client, and what libraries set that our own process had imported by then. A server's engine has one of its
    own therefore: vLLM spawns it, by `multiprocessing`, with another OpenMP preloaded on a CPU.

    Each process has one thread of OpenMP, whatever the plan says: several that wait for each other at every layer of a
    tiny model take more time and CPU time than one. The functions that even an eager vLLM compiles stay as they are:
    each engine would compile or load them anew.
    """
    python = str(vllm.python)
    (folder / "bin").mkdir(exist_ok=True)
    script, spawned, place = folder / "bin" / "vllm", folder / "bin" / "python", folder / "warm.socket"
    names = {"python": sys.executable, "vllm": python, "place": str(place)}
    _executable(spawned, (_SPAWNED_SCRIPT + _ASKING).format(**names) + _FORKED)
    _executable(script, (_VLLM_SCRIPT + _ASKING).format(**names) + _FORKED)
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        listening.listen(64)
        known: dict[str, Path] = {}
        making: dict[str, threading.Lock] = {}
        numbers = itertools.count()

        def answer(line: socket.socket, content: str) -> None:
            with line, making.setdefault(content, threading.Lock()):
                if content not in known:
                    made = folder / f"{next(numbers)}.socket"
                    stack.enter_context(_warm(python, made, str(spawned), _VLLM, json.loads(content), str(folder)))
                    known[content] = made
                with contextlib.suppress(OSError):  # it may be gone by now
                    line.sendall(str(known[content]).encode())

        def make_warm() -> None:
            # Who asks for what is there does not wait for what another asks for.
            with listening, ThreadPoolExecutor(8) as answering:
                while asked := _next_environment(listening):
                    answering.submit(answer, *asked)

        thread = threading.Thread(target=make_warm)
        thread.start()
        try:
            yield VllmEnvironment(script)
        finally:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _next_environment(listening: socket.socket) -> tuple[socket.socket, str] | None:
    """Who asks, and the variables it was started with, as JSON; None when nobody will ask any more."""
    try:
        line, _ = listening.accept()
    except OSError:
        return None
    content = b""
    while part := line.recv(1 << 20):
        content += part
    return line, content.decode()


@contextlib.contextmanager
def _warm(
    python: str, place: Path, executable: str, modules: tuple[str, ...], environment: Mapping[str, str], folder: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that forks for who connects to ``place``; it has imported the modules when the block begins."""
    argv = [python, str(_FORKS), str(place), executable, *modules]
    process = subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != b"warm\n":
            assert line, f"{python} could not import {' '.join(modules)}"
        yield process
    finally:
        process.communicate()  # the end of its input is the order to stop


def _executable(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def programs(python: str | Path) -> list[int]:
    """Processes of the programs that such a Python runs now, and of what they started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [pid for waiter in children.get(_PROCESSES[str(python)], []) for pid in children.get(waiter, [])]
    for pid in found:
        found += children.get(pid, [])  # the list grows while it is read
    return found
