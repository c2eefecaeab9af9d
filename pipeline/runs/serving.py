"""Find the model, target and load that a person names, plan its launch, and run servers until a signal stops them.

    >>> overrides_of(["max-num-seqs=256", "VLLM_ROCM_USE_AITER=0", "--enforce-eager"])
    {'--max-num-seqs': '256', 'VLLM_ROCM_USE_AITER': '0', '--enforce-eager': True}
    >>> speculation_of("eagle3:/models/draft:2")
    Speculative(method='eagle3', model='/models/draft', tokens=2)

Only small files are read; `fetched` downloads the weights of a repository. Ctrl-C, SIGTERM and SIGHUP stop every server
that `serve` started.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from quantmint.eval import workloads
from quantmint.eval.errors import DefinitionError
from quantmint.pipeline.base.argument import classify
from quantmint.pipeline.base.errors import QuantmintError, UserError, did_you_mean
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.base.processes import stop_signals
from quantmint.pipeline.base.progress import Progress, reporter_for
from quantmint.pipeline.publish.addresses import published_folder, serving_name
from quantmint.pipeline.publish.release import DRAFT
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.recipe.load import LoadedRecipe, recipe_names
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.serving import Serve, Speculative
from quantmint.pipeline.runs.planner import build_plan, find_entry
from quantmint.pipeline.runs.search import stand_in
from quantmint.pipeline.runs.session import open_setting, recipe_named
from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from quantmint.pipeline.serving.host.checks import preflight
from quantmint.pipeline.serving.host.context import checkpoint_needs
from quantmint.pipeline.serving.host.detect import detect, visible_devices
from quantmint.pipeline.serving.knobs.table import NEWEST_READ, knob, table
from quantmint.pipeline.serving.model.facts import ModelFacts, model_facts
from quantmint.pipeline.serving.plan import LaunchPlan, Process, processes
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import Profile, ServingTarget, parse_target, profile, profiles
from quantmint.pipeline.serving.running.dialect import VLLM, Dialect, dialect_of
from quantmint.pipeline.serving.running.endpoint import EndpointLauncher
from quantmint.pipeline.serving.running.launchers import DockerLauncher, LocalLauncher
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.draft import draft_model
from quantmint.pipeline.stages.serve import facts_made, held_to, require_endpoints
from quantmint.pipeline.stages.setting import Setting, SourceIdentity
from quantmint.pipeline.stages.source import config_folder, fetch, identify, model_folder, repository
from quantmint.pipeline.store.tree import Store

_VERSION = re.compile(r"v?\d+\.\d+(\.\d+)?([.+a-z]\S*)?")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to plan a launch for.

    ``model`` is the name on the command line: an absolute path, or a repository that vLLM would fetch by itself at
    ``revision``. ``missing`` is the error that serving it would raise, None where its weights are here or can be
    fetched. ``identity`` is set for a repository. ``recipe`` is None for a model without a recipe; ``tunableop`` is the
    file of tuned kernels that the recipe names, ``draft`` the folder of its draft. ``loaded`` has the recipe's file.
    """

    model: str
    facts: ModelFacts
    name: str
    recipe: Recipe | None = None
    revision: str | None = None
    identity: SourceIdentity | None = None
    tunableop: Path | None = None
    missing: UserError | None = None
    draft: Path | None = None
    loaded: LoadedRecipe | None = None

    @property
    def dialect(self) -> Dialect:
        """The requests of the runtime that the recipe names; without a recipe, vLLM's."""
        return VLLM if self.recipe is None else dialect_of(self.recipe.serve.runtime)

    def require_launcher(self, kind: str) -> None:
        """Raise `RecipeError` where the launcher ``kind`` does not serve by the recipe's runtime."""
        if self.loaded is not None:
            require_endpoints(self.loaded, kind)

    def speculative(self, section: Serve) -> Speculative | None:
        """Return a recipe's speculative decoding, with the draft that lies beside the checkpoint as its model."""
        if self.draft is None or section.speculative is None:
            return section.speculative
        return section.speculative.model_copy(update={"model": str(self.draft)})


def find_model(
    text: str, *, store: Path, baseline: bool = False, config: Path | None = None, vllm: str | None = None
) -> ServedModel:
    """Return the model that ``text`` names: a recipe's checkpoint, a folder, or a repository of the Hub.

    ``baseline`` selects a recipe's 16-bit model; ``config`` is a folder with a config.json that stands in for a
    recipe's source, without a network; ``vllm`` names the recipe's serving environment. Raises `UserError`, with the
    nearest name, for any other text.
    """
    folder = classify(text).kind == "folder"
    recipe = None if folder else recipe_named(text, store)
    if recipe is not None:
        return _of_recipe(recipe, store, baseline=baseline, config=config, vllm=vllm)
    if baseline:
        raise UserError(f"--baseline: found {text}, expected a recipe")
    if folder:
        return _folder(Path(text))
    source = repository(text)
    if source is None:
        raise UserError(
            f"MODEL: found {text!r}, expected a folder with a model, org/name[@revision] of the Hub, or a recipe"
            f"{did_you_mean(text, recipe_names())}"
        )
    return _repository(identify(source, None, store))


def fetched(model: ServedModel, *, with_code: bool, progress: Progress) -> ServedModel:
    """Return the model with all of its weights on this machine, after downloading a repository.

    ``with_code`` downloads Python files too. Raises `UserError` where a recipe has made no checkpoint yet or weights
    are missing, `StageError` where the download fails.
    """
    if model.missing is not None:
        raise model.missing
    if model.identity is not None and model.identity.folder is None:
        folder = fetch(model.identity, with_code=with_code, progress=progress)
        model = replace(model, model=str(folder.resolve()), facts=model_facts(folder), revision=None)
    _require_whole(Path(model.model), with_code=with_code)
    return model


def _require_whole(folder: Path, *, with_code: bool) -> None:
    """Raise `UserError` for a checkpoint that lacks tensors of a layer, which vLLM would serve without an error.

    Architectures that transformers does not know are not checked.
    """
    try:
        structure = read_structure(folder, open_checkpoint(folder).tensors, trust_remote_code=with_code)
    except UserError:  # vLLM knows architectures that transformers does not
        return
    structure.require_whole(folder)


def _folder(path: Path) -> ServedModel:
    """Return the model in a folder, named after the folder or the link to it.

    A folder with a config.json alone can be planned for, but not served.
    """
    folder = path.resolve()
    facts = model_facts(folder)
    missing = UserError(
        f"{path} has no *.safetensors, expected a model's weights", hint="--dry-run plans without them."
    )
    return ServedModel(str(folder), facts, path.absolute().name, missing=missing if facts.counted else None)


def _repository(identity: SourceIdentity) -> ServedModel:
    repo = str(identity.repo)
    facts = model_facts(config_folder(identity))
    return ServedModel(repo, facts, repo.rpartition("/")[2], revision=identity.digest, identity=identity)


def _of_recipe(text: str, store: Path, *, baseline: bool, config: Path | None, vllm: str | None) -> ServedModel:
    setting = stand_in(open_setting(text, store=Store(store), vllm=vllm, config=config))
    recipe, repo = setting.recipe, str(setting.recipe.source.repo)
    if not baseline and (checkpoint := _checkpoint_of(setting, config)) is not None:
        served = replace(_folder(checkpoint), name=recipe.name)
    elif setting.loaded.source_folder is not None:
        served = _folder(setting.loaded.source_folder)
    elif config is None:
        served = _repository(setting.source)
    else:  # only planned for: the repository was not asked for its commit
        missing = UserError(f"{repo} was planned for from --config alone", hint="Leave --config out to serve it.")
        name, revision = repo.rpartition("/")[2], recipe.source.revision
        served = ServedModel(repo, model_facts(config), name, revision=revision, missing=missing)
    if not baseline and checkpoint is None:
        missing = UserError(
            f"{recipe.name} has made no checkpoint yet",
            hint=f"quantmint run {text} makes it; --baseline serves the 16-bit model, --dry-run plans.",
        )
        model = str(published_folder(recipe, setting.home) or serving_name(recipe))
        served = ServedModel(model, facts_made(served.facts, recipe.quantization), recipe.name, missing=missing)
    draft = None if recipe.draft is None else draft_model(setting, "baseline" if baseline else "candidate")
    if draft is not None and not baseline and (Path(served.model) / DRAFT).is_dir():
        draft = Path(served.model) / DRAFT  # a release has its own
    return replace(served, recipe=recipe, tunableop=setting.loaded.tunableop, draft=draft, loaded=setting.loaded)


def _checkpoint_of(setting: Setting, config: Path | None) -> Path | None:
    """Return the folder of the recipe's checkpoint: the store's, else the published one; None without either.

    With ``config``, a stand-in for the source, only the published one counts.
    """
    if config is None:
        planned = next(planned for planned in build_plan(setting) if planned.key == "quantize")
        entry = find_entry(planned, setting)
        if entry is not None:
            return model_folder(entry)
    published = published_folder(setting.recipe, setting.home)
    return published if published is not None and (published / "config.json").is_file() else None


def vllm_for(command: str | None, version: str | None, *, elsewhere: bool) -> tuple[str, VllmEnvironment | None]:
    """Return the vLLM version to plan for, and the environment of ``command`` (``--vllm``) or of this machine.

    A launch that is only planned, or runs ``elsewhere``, needs no environment: it is planned for ``version``
    (``--vllm-version``), else for the environment's, else for the newest that the tables know. Raises `UserError` for a
    wrong option, and where an environment is needed and not found.
    """
    if version_of(command) is not None:
        raise UserError(
            f"--vllm: found the version {command}, expected the `vllm` command to run or its environment",
            hint=f"--vllm-version {command} --dry-run plans for it; --launcher docker runs it.",
        )
    if version is not None and version_of(version) is None:
        raise UserError(f"--vllm-version: found {version!r}, expected a version such as {NEWEST_READ}")
    if version is not None and not elsewhere:
        raise UserError(
            f"--vllm-version: {version} is planned for with --dry-run, and run with --launcher docker",
            hint="--vllm names the `vllm` command to run.",
        )
    try:
        environment = find_vllm(command)
        return version or environment.version, environment
    except QuantmintError:
        if not elsewhere or command is not None:
            raise
        return version or NEWEST_READ, None


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """A launch: a model, the ``request`` to plan it by, and the machines that it runs on.

    ``hosts`` are the nodes' addresses in order, ``node_rank`` is this machine's place among them. With ``planning``
    nothing is started, and GPUs that are not visible here give a warning, because the plan may be for another machine.
    """

    model: ServedModel
    request: ServingRequest
    environment: VllmEnvironment | None = None
    hosts: Sequence[str] = ()
    port: int = 8000
    node_rank: int = 0
    planning: bool = False

    def plan(self) -> tuple[LaunchPlan, tuple[Process, ...]]:
        """Return the plan and its processes. Raises `UserError` where the model cannot be served on the target."""
        plan = plan_serving(self.request)
        if self.model.revision is not None:
            plan = replace(plan, argv=(*plan.argv, "--revision", self.model.revision))
        if self.model.missing is not None:
            plan = replace(plan, warnings=(f"only planned: {self.model.missing.message}", *plan.warnings))
        launched = partial(processes, plan, port=self.port, host_ips=self.hosts)
        try:
            visible = visible_devices(os.environ, parse_target(plan.target).accelerator.kind)
            return plan, launched(visible=visible, node_rank=self.node_rank)
        except UserError as error:
            if not self.planning:
                raise
            numbered = launched()  # raises again what has nothing to do with the GPUs of this machine
            return replace(plan, warnings=(f"planned for GPUs from 0 on: {error.message}", *plan.warnings)), numbered


def target_for(text: str | None, recipe: Recipe | None) -> ServingTarget:
    """Return the target that ``text`` names, else the recipe's, else this machine (also for ``auto``).

    Raises `UserError` for a text that is no target, and where this machine's accelerators cannot be identified.
    """
    if text is None and recipe is not None:
        return parse_target(f"{recipe.target.hardware}:{recipe.target.gpus}")
    if text is None or text == "auto":
        return detect(Host()).target
    return parse_target(text)


def profile_for(
    text: str | None, recipe: Recipe | None, *, concurrency: int | None, max_model_len: int | None
) -> Profile:
    """Return the load profile that ``text`` names, directly or by a workload; else the recipe's, else throughput.

    A workload gives its largest concurrency and its longest request, a recipe its max_model_len; ``concurrency`` and
    ``max_model_len`` (tokens) take precedence. Raises `UserError` for an unknown workload.
    """
    length = max_model_len if recipe is None else max_model_len or recipe.target.max_model_len
    if text is None and recipe is None:
        text = "throughput"
    if text in profiles():
        return profile(str(text), concurrency=concurrency, max_model_len=length)
    try:
        load = workloads.load(text or (recipe.target.workload if recipe is not None else ""))
    except DefinitionError as error:
        raise UserError(f"--workload: {error}") from error
    most, chosen = load.in_flight, load.profile
    if recipe is not None and text is None:
        chosen = recipe.serve.profile or chosen
        most = max(most, recipe.evaluation.concurrency)
    if max_model_len is None and length is not None and length < load.longest:
        length = None  # the plan chooses one that is long enough
    return profile(chosen, concurrency=concurrency or most, max_model_len=length, longest=load.longest)


def overrides_of(texts: Iterable[str]) -> dict[str, str | bool]:
    """Parse ``NAME=VALUE`` settings; a flag without a value is on, ``NAME=false`` leaves the knob out.

    The dashes of a flag may be left out. Raises `UserError`, with the nearest spelling, for an unknown knob.
    """
    overrides: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        entry = table().get(f"--{name.replace('_', '-')}") or knob(name)
        overrides[entry.name] = True if not equals or value == "true" else value != "false" and value
    return overrides


def speculation_of(text: str) -> Speculative:
    """Parse ``METHOD[:MODEL]:TOKENS``; a method alone has 2 tokens. Raises `UserError` for any other text."""
    method, *model, tokens = text.split(":") if ":" in text else (text, "2")
    try:
        return Speculative(method=method, model=":".join(model) or None, tokens=int(tokens))
    except ValueError:  # ValidationError is one
        raise UserError(
            f"--speculative: found {text!r}, expected METHOD[:MODEL]:TOKENS, such as eagle3:/models/draft:2"
        ) from None


def version_of(text: str | None) -> str | None:
    """Return the vLLM version that ``text`` is, without a leading v.

    None for None, and for a command or an environment.
    """
    if text is None or Path(text).exists() or not _VERSION.fullmatch(text):
        return None
    return text.removeprefix("v")


def serve(
    request: ServeRequest,
    kind: str,
    *,
    logs: Path,
    startup_timeout: float,
    image: str | None,
    endpoint: str | None,
    node_rank: int,
) -> int:
    """Serve until a signal stops it; return 0, or 130 where no server had answered yet.

    ``kind`` of launcher is local, docker or endpoint; ``image`` is docker's, ``endpoint`` the address of a running
    server; ``node_rank`` is this machine's place among the nodes. Raises `ServingError` where a server does not start
    or dies, with the cause that its log names, `UserError` for missing options.
    """
    plan, processes = request.plan()
    reporter = reporter_for(json=False)
    launcher: LocalLauncher | DockerLauncher | EndpointLauncher
    if kind == "endpoint":
        if endpoint is None:
            raise UserError("--launcher endpoint: found no --endpoint URL, expected the address of the server")
        launcher = EndpointLauncher(endpoint, request.model.dialect)
    else:
        nodes = plan.layout.nodes
        if nodes > 1 and len(request.hosts) < nodes:
            raise UserError(f"--host-ip: found {len(request.hosts)} addresses, expected {nodes}, one for each node")
        if kind == "docker":
            launcher = DockerLauncher(image, node_rank=node_rank)
        else:
            assert request.environment is not None  # noqa: S101 - looked for before anything else
            launcher = LocalLauncher(request.environment.executable, node_rank=node_rank)
        for line in (*plan.warnings, *_unready(request, plan)):
            reporter.warn(line)
    folder = logs / f"serve-{plan.served_model_name.replace('/', '-')}-{request.port}"
    answered = False
    orders: list[int] = []

    def stop(number: int) -> None:
        orders.append(number)
        if len(orders) == 1:  # later ones do not disturb the end
            raise StoppedError

    try:
        with stop_signals(stop), ExitStack() as stack:
            started = launcher.deploy(plan, processes, folder, startup_timeout=startup_timeout, notify=reporter.say)
            running = stack.enter_context(started)
            answered = True
            for line in _report(plan, running.servers, folder):
                click.echo(line)
            running.watch()
    except StoppedError:
        click.echo("stopped" if answered else "stopped before it answered", err=not answered)
    return 0 if answered else 130


def _report(plan: LaunchPlan, servers: Sequence[RunningServer], logs: Path) -> Iterator[str]:
    """Yield lines about the running servers: address, version, kernels, cache, broken promises, an example request.

    A node that only joins has no server; a server that was started elsewhere has no log here.
    """
    for server in servers:
        yield f"serving     {server.model_name} at {server.base_url}, ready after {server.started_seconds:.0f} s"
        if server.log_path is None:
            yield f"{server.dialect.runtime:<11} {server.version()}"
            continue
        scan = held_to(plan, server.scan_log(), Path(plan.model))
        version = scan.vllm_version or server.version()
        yield f"vllm        {version}" + (f", attention {scan.attention_backend}" if scan.attention_backend else "")
        if scan.kernels:
            yield f"kernels     {', '.join(scan.kernels)}"
        if scan.kv_tokens is not None:
            concurrency = scan.concurrency
            requests = "" if concurrency is None else f", {concurrency:,.1f} requests of full length at a time"
            yield f"KV cache    {scan.kv_tokens:,} tokens{requests}"
        for finding in scan.findings:
            yield f"{'fault' if finding.level == 'invalid' else 'caution':<11} {finding.why}"
            yield f"{'':<11}   {finding.line}"
    if servers:
        body = json.dumps({"model": servers[0].model_name, "prompt": "Hello", "max_tokens": 16})
        url = f"{servers[0].base_url}/v1/completions"
        yield f"try         {shlex.join(['curl', '-s', url, '-H', 'Content-Type: application/json', '-d', body])}"
    else:
        yield "joined      the head of this launch serves"
    yield f"stop        Ctrl-C; logs in {logs}"


def _unready(request: ServeRequest, plan: LaunchPlan) -> Iterator[str]:
    """Yield a line for each check of the plan that warns or fails on this machine, as in `quantmint doctor`."""
    vllm = None if request.environment is None else request.environment.executable
    for finding in preflight(plan, Host(), vllm=vllm, checkpoint=checkpoint_needs(request.model.facts)):
        if finding.status in ("warn", "fail"):
            yield f"{finding.name}: found {finding.found}, expected {finding.expected}; {finding.fix}"


class StoppedError(BaseException):
    """A signal to stop. It is no `Exception`, so that handlers of errors do not catch it."""
