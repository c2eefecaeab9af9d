"""The Python API, which `import quantmint` gives: quantize, inspect, plan, run and verify, as the commands do.

    import quantmint

    checkpoint = quantmint.quantize("models/llama", "out", "ptpc_fp8")
    print(checkpoint.bytes / checkpoint.source_bytes, checkpoint.inspection)

Paths are strings or `pathlib.Path`. Errors are `QuantmintError`, those of a user `UserError` with a hint. Progress goes
to ``reporter``, by default to none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.base.progress import PlainReporter, Reporter
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe, recipe_of

if TYPE_CHECKING:
    from quantmint.eval.verdict import Verdict
    from quantmint.pipeline.publish.card import CardFacts, ServingCommand
    from quantmint.pipeline.publish.destination import Publication
    from quantmint.pipeline.publish.verify.subject import ReleaseCheck
    from quantmint.pipeline.quantize.inspection.findings import Inspection
    from quantmint.pipeline.recipe.schema import Recipe
    from quantmint.pipeline.runs.forecast import RunForecast
    from quantmint.pipeline.runs.oneshot import QuantizationJob
    from quantmint.pipeline.runs.runner import RunOutcome
    from quantmint.pipeline.stages.setting import Setting

__all__ = [
    "LoadedRecipe",
    "QuantizedCheckpoint",
    "QuantmintError",
    "RunResult",
    "UserError",
    "Verification",
    "inspect",
    "load_recipe",
    "plan",
    "quantize",
    "run",
    "verify",
]


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A checkpoint that `quantize` finished; ``made`` is False where an earlier call had finished it.

    ``record`` is the content of ``quantmint/job.json`` in the folder: sizes in bytes, modules by scheme, seconds by
    part, digests of the files.
    """

    folder: Path
    made: bool
    record: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of the checkpoint's weight files."""
        return int(self.record["bytes"])

    @property
    def source_bytes(self) -> int:
        """Bytes of the source's weights."""
        return int(self.record["source_bytes"])

    @property
    def schemes(self) -> Mapping[str, int]:
        """Number of linear modules by scheme."""
        return dict(self.record["schemes"])

    @property
    def inspection(self) -> str | None:
        """Verdict of the inspection, "PASS"; None where it was left out."""
        verdict: str | None = self.record["inspection"]
        return verdict


def open_quantization(
    model: str | Path,
    out: str | Path,
    quantization: str | Mapping[str, Any],
    *,
    calibration: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    inspect: bool = True,
    to_run: bool = True,
) -> QuantizationJob:
    """Return the job of `quantize` with the same arguments; nothing is written yet.

    ``to_run`` checks the recipe against this machine's CPU. Raises `UserError` for what cannot be made.
    """
    from quantmint.pipeline.runs.oneshot import open_job, source_section

    section = {"scheme": quantization} if isinstance(quantization, str) else dict(quantization)
    sections = {
        "trust_remote_code": trust_remote_code,
        "quantization": section,
        "calibration": calibration,
        "source": source_section(str(model)),
    }
    return open_job(recipe_of(sections), Path(out), device=device, inspect=inspect, to_run=to_run)


def quantize(
    model: str | Path,
    out: str | Path,
    quantization: str | Mapping[str, Any],
    *,
    calibration: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    inspect: bool = True,
    on: str | None = None,
    reporter: Reporter | None = None,
) -> QuantizedCheckpoint:
    """Quantize a model (a folder, or ``organisation/name[@revision]`` of the Hub) into the folder ``out``.

    ``quantization`` is a scheme, or a recipe's section of that name ({"scheme": "mxfp4", "algorithm": "gptq"});
    ``calibration`` is the section of that name ({"set": "ultrachat", "samples": 128}). Without ``inspect`` the result
    is not inspected. ``on`` is ray or ray://HEAD, a cluster to compute on. The same call resumes an interrupted one.
    Raises `UserError` for what cannot be made, `StageError` where the work fails, `InspectionError` where the result is
    unsound.
    """
    job = open_quantization(
        model,
        out,
        quantization,
        calibration=calibration,
        trust_remote_code=trust_remote_code,
        device=device,
        inspect=inspect,
    )
    return finish_quantization(job, on=on, reporter=reporter)


def finish_quantization(
    job: QuantizationJob, *, on: str | None = None, reporter: Reporter | None = None
) -> QuantizedCheckpoint:
    """Make the checkpoint of a job, or resume it; ``on`` and errors are as in `quantize`."""
    from quantmint.pipeline.runs.oneshot import make_checkpoint

    reporter = reporter or Quiet()
    with _spread(on, job.setting, reporter) as setting:
        made = make_checkpoint(replace(job, setting=setting), reporter)
    return QuantizedCheckpoint(job.out, made, job.record)


def inspect(
    checkpoint: str | Path,
    source: str | Path | None = None,
    *,
    allow_unit_kv_scales: bool = False,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Inspection:
    """Check a compressed-tensors or Quark checkpoint against its config.json, and with ``source`` against that model.

    ``source`` is the folder of the 16-bit model: with it the error of every layer is measured, and tensors that were
    not quantized are compared. Raises `UserError` for a folder that is no such checkpoint, and for a quantized source.
    """
    from quantmint.pipeline.quantize.device import resolve_device
    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
    from quantmint.pipeline.quantize.formats.layout import layout_of
    from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
    from quantmint.pipeline.quantize.model.encodings import DECODED
    from quantmint.pipeline.quantize.model.reader import read_structure

    fetch_release = open_checkpoint(Path(checkpoint))
    layout_of(fetch_release.config)
    original = None if source is None else open_checkpoint(Path(source))
    structure = read_structure(fetch_release.folder, fetch_release.tensors)
    origin = None if original is None else read_structure(original.folder, original.tensors)
    if origin is not None and origin.undecodable is not None:
        raise UserError(
            f"--source: found a model that is quantized already ({origin.undecodable}), expected 16-bit weights, or an "
            f"encoding that is decoded: {DECODED}.",
            hint="Name the model that the checkpoint was made from.",
        )
    with (reporter or Quiet()).bar(fetch_release.nbytes, "B") as advance:
        return inspect_checkpoint(
            fetch_release,
            structure,
            source=original,
            source_structure=origin,
            allow_unit_kv_scales=allow_unit_kv_scales,
            device=resolve_device(device),
            advance=advance,
        )


def plan(
    recipe: str | Path | LoadedRecipe,
    *,
    machine: str | None = None,
    config: str | Path | None = None,
    store: str | Path = "store",
    vllm: str | None = None,
) -> RunForecast:
    """Forecast a run of a recipe: its stages, their time, memory and disk, and what its gate can show.

    ``machine`` is the machine to forecast for, such as "mi300x:8" or "here" (None: the recipe's target, if that is
    another machine). ``config`` is a folder with the model's config.json, to plan without its weights. Raises
    `UserError` where no run could succeed.
    """
    from quantmint.pipeline.runs.forecast import forecast_run
    from quantmint.pipeline.runs.search import stand_in
    from quantmint.pipeline.runs.session import open_setting
    from quantmint.pipeline.store.tree import Store

    folder = None if config is None else Path(config)
    setting = open_setting(_recipe(recipe), store=Store(Path(store)), vllm=vllm, config=folder)
    return forecast_run(stand_in(setting), machine=machine, config=folder)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a finished run: its outcome, the setting that was run, and the tries of a search.

    Each try has the choice's bits, cost and groups by scheme, and its verdict.
    """

    outcome: RunOutcome
    setting: Setting
    tries: Sequence[Mapping[str, Any]]

    @property
    def verdict(self) -> Verdict | None:
        """The gate's verdict; None where the run ended before the gate."""
        return self.outcome.verdict

    @property
    def published(self) -> Sequence[Publication]:
        """Publications of the run, one for each destination; empty where nothing was published."""
        from quantmint.pipeline.stages.publish import published_in

        entry = self.outcome.entry("publish")
        return () if entry is None else published_in(entry)

    @property
    def report(self) -> Path | None:
        """Path of the report's page; None without a report.

        It is the page beside the published checkpoint where a folder has this release as its current one, else the
        store's.
        """
        from quantmint.eval.report.model import PAGE
        from quantmint.pipeline.publish.addresses import published_folder
        from quantmint.pipeline.publish.release import EVIDENCE

        entry = self.outcome.entry("report")
        if entry is None:
            return None
        folder = published_folder(self.setting.recipe, self.setting.home)
        tags = {release.tag for release in self.published}
        current = folder is not None and folder.is_symlink() and folder.resolve().name in tags
        return folder / EVIDENCE / PAGE if folder is not None and current else entry.file(PAGE)


def run(
    recipe: str | Path | LoadedRecipe,
    *,
    until: str | None = None,
    redo: Sequence[str] = (),
    device: str = "auto",
    on: str | None = None,
    vllm: str | None = None,
    store: str | Path = "store",
    remote_store: str | None = None,
    reporter: Reporter | None = None,
    endpoints: Sequence[str] = (),
) -> RunResult:
    """Run a recipe (a name, a YAML file, or a loaded one): quantize, prove and, after a PASS, publish.

    ``until`` is the last stage, ``redo`` names stages to make again although the store has them. ``on`` is ray or
    ray://HEAD, a cluster to compute on; ``remote_store`` is the URL of a store to share. ``endpoints`` are
    "baseline=URL" and "candidate=URL" of servers that run already, for a recipe with `serve: {runtime: sglang}`. Raises
    `QuantmintError`; finished stages stay, and the same call resumes after them.
    """
    from quantmint.pipeline.runs.search import run_search
    from quantmint.pipeline.runs.session import open_setting, with_endpoints
    from quantmint.pipeline.serving.host.detect import local_device
    from quantmint.pipeline.store.remote import open_tier
    from quantmint.pipeline.store.tree import Store

    reporter = reporter or Quiet()
    setting = open_setting(
        _recipe(recipe),
        store=Store(Path(store), on_warning=reporter.warn),
        vllm=vllm,
        device=device,
        to_run=True,
        remote=None if remote_store is None else open_tier(remote_store, reporter.warn, local_device),
    )
    with _spread(on, with_endpoints(setting, endpoints), reporter) as setting:
        return RunResult(*run_search(setting, reporter, until=until, redo=redo))


@dataclass(frozen=True, slots=True)
class Verification:
    """The checks of a release, with the exit code and the conclusion of `quantmint release verify`."""

    checks: Sequence[ReleaseCheck]

    @property
    def exit_code(self) -> int:
        """The exit code: 0 where all checks pass, 1 where one fails, 3 where one could not be made."""
        from quantmint.pipeline.publish.verify.subject import exit_code

        return exit_code(tuple(self.checks))

    @property
    def conclusion(self) -> str:
        """One word for all checks, such as VERIFIED or CONSISTENT."""
        from quantmint.pipeline.publish.verify.subject import conclusion

        return conclusion(tuple(self.checks))


def verify(
    release: str | Path,
    *,
    key: str | Path | None = None,
    identity: str | None = None,
    issuer: str | None = None,
    unsigned: bool = False,
    name: str | None = None,
    source: str | Path | None = None,
    reporter: Reporter | None = None,
) -> Verification:
    """Check all of a release that can be checked with nothing but what was published.

    ``release`` is a folder, a repository (org/name) or a bucket, with @TAG for another than the current release. Its
    signer is named by a public ``key`` (a PEM file), or by ``identity`` and ``issuer``; with ``unsigned`` a release
    without a signature is accepted. ``name`` is the name of the expected release. With ``source``, the
    folder of the model that it was made from, weights, configuration, template and tokenizer are compared with that.
    Raises `UserError` where there is no
    release, and for a signer named in both ways or by half of one.
    """
    from quantmint.pipeline.publish.signing import public_fingerprint
    from quantmint.pipeline.publish.verify.files import Trust
    from quantmint.pipeline.publish.verify.run import fetch_release
    from quantmint.pipeline.publish.verify.run import verify as check_release
    from quantmint.pipeline.publish.verify.subject import ExpectedName, failure
    from quantmint.pipeline.store.files import OtherBytesError

    if key is not None and (identity or issuer):
        raise UserError("found --key as well as --identity or --issuer, expected one of the two ways to name a signer")
    if (identity is None) != (issuer is None):
        raise UserError("found one of --identity and --issuer, expected both: names are only unique at an issuer")
    public = None if key is None else Path(key)
    if public is not None:
        public_fingerprint(public)  # before a large model is fetched
    reporter = reporter or Quiet()
    try:
        folder, tag, expected = fetch_release(str(release), reporter)
        expected = expected if name is None else ExpectedName(name)
        trust = Trust(public, identity, issuer, unsigned)
        original = None if source is None else Path(source)
        checks = check_release(folder, trust, reporter, tag=tag, expected=expected, relaunch=_launches, source=original)
    except OtherBytesError as error:  # what fails already on the way here needs no further check to be false
        checks = (failure("digests", error.message, "it was not fetched; nothing else was checked"),)
    return Verification(checks)


class Quiet(PlainReporter):
    """A reporter that prints only warnings, to standard error."""

    def _line(self, text: str) -> None:
        if "warning: " in text:
            super()._line(text)


def _recipe(recipe: str | Path | LoadedRecipe) -> str | LoadedRecipe:
    return str(recipe) if isinstance(recipe, Path) else recipe


def _launches(folder: Path, recipe: Recipe, facts: CardFacts) -> tuple[ServingCommand, ...]:
    """Return the serving commands that a release's card shows, planned as the card's stage plans them."""
    from quantmint.eval import workloads
    from quantmint.pipeline.serving.model.facts import model_facts
    from quantmint.pipeline.stages.card import launches, vllm_of

    workload = workloads.load(recipe.target.workload)
    model = facts.repo or facts.name
    return launches(recipe, workload, model_facts(folder), model, vllm=vllm_of(facts.report))


@contextmanager
def _spread(on: str | None, setting: Setting, reporter: Reporter) -> Iterator[Setting]:
    """Yield the setting with the machines that ``on`` names, on which calibration and quantization run."""
    from quantmint.pipeline.clusters.ray.spread import open_spread

    machines = open_spread(
        on,
        setting.recipe,
        device=setting.device,
        source=setting.source.folder,
        store=setting.store.root,
        progress=reporter,
    )
    with machines as cluster:
        yield replace(setting, spread=cluster)
