"""Looks at the serving environment: vLLM, what it was built for, what a checkpoint needs of it."""

from __future__ import annotations

from pipeline.errors import UserError
from pipeline.serving import hardware as accelerators
from pipeline.serving.host.finding import Outcome
from pipeline.serving.host.look.processor import cpu_flags
from pipeline.serving.host.subject import Subject, Wanted
from pipeline.serving.knobs.table import NEWEST_READ, OLDEST_READ
from pipeline.serving.versions import parse_version

_FIRST, _LAST = (parse_version(version)[:2] for version in (OLDEST_READ, NEWEST_READ))
_BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "a CPU"}
_BUILD_FIXES = {
    "rocm": "install vLLM's ROCm build in an environment of its own, or use the image rocm/vllm; set QUANTMINT_VLLM",
    "cuda": "install vllm in an environment of its own, or use the image vllm/vllm-openai; set QUANTMINT_VLLM",
    "cpu": "`make serving` builds vLLM for a CPU",
}


def vllm(subject: Subject) -> Outcome:
    """There is a vLLM, of a version that the table of knobs knows."""
    first, last = (".".join(map(str, version)) for version in (_FIRST, _LAST))
    values = {"first": first, "last": last, "fix": f"install vLLM {last}, or plan for this one with care"}
    there = subject.installed
    if there is None or there.vllm is None:
        absent = f"{there.python} has no vLLM" if there is not None else subject.missing
        fix = "`make serving` builds one for a CPU; on a GPU install vLLM's own build and set QUANTMINT_VLLM to it"
        return Outcome("fail", absent, values | {"fix": fix})
    try:
        version = parse_version(there.vllm)[:2]
    except UserError:
        return Outcome("warn", f"{there.vllm}, which is no release", values)
    if version < _FIRST:
        return Outcome("fail", there.vllm, values)
    return Outcome("ok" if version <= _LAST else "warn", there.vllm, values)


def build(subject: Subject) -> Outcome:
    """That vLLM computes on this hardware."""
    values = {"kind": _BUILDS[subject.kind], "fix": _BUILD_FIXES[subject.kind]}
    there = subject.installed
    if there is None or there.vllm is None:
        return Outcome("skipped", "there is no vLLM", values)
    if there.build is None:
        return Outcome("fail", f"{there.python} has no torch", values)
    found = f"built for {_BUILDS[there.build]} (torch {there.versions.get('torch', 'of unknown version')})"
    return Outcome("ok" if there.build == subject.kind else "fail", found, values)


def quark(subject: Subject) -> Outcome:
    """What emulates microscaling formats is there, if they are emulated."""
    values = {"distributions": "amd-quark", "python": "python"}
    wanted, there = subject.wanted, subject.installed
    if wanted is None:
        return Outcome("skipped", "needed where vLLM emulates an MX scheme; --model tells", values)
    needed = accelerators.needs(subject.target.hardware, wanted.scheme, wanted.kv_cache, wanted.checkpoint_format)
    if not needed:
        title = subject.target.accelerator.title
        return Outcome("skipped", f"{_scheme(wanted)} is not emulated on {title}", values)
    if there is None:
        return Outcome("skipped", "there is no serving environment", values)
    values = {"distributions": " ".join(needed), "python": there.python}
    absent = [name for name in needed if name not in there.versions]
    if absent:
        return Outcome("fail", f"{' and '.join(absent)} is not there", values)
    return Outcome("ok", ", ".join(f"{name} {there.versions[name]}" for name in needed), values)


def checkpoint(subject: Subject) -> Outcome:
    """vLLM has the kernels that this checkpoint asks for."""
    target, wanted = subject.target, subject.wanted
    values = {
        "hardware": target.accelerator.title,
        "fix": "serve it elsewhere, or quantize to a scheme that loads here",
    }
    if wanted is None:
        return Outcome("skipped", "no --model was given", values)
    flags = cpu_flags(subject.machine) if subject.kind == "cpu" else None
    asked = (target.hardware, wanted.scheme, wanted.kv_cache, wanted.checkpoint_format)
    reason = accelerators.refusal(*asked, cpu_flags=flags)
    if reason is not None:
        return Outcome("fail", reason, values)
    found = f"{_scheme(wanted)}, KV cache {wanted.kv_cache}"
    cautions = accelerators.cautions(*asked, cpu_flags=flags)
    if cautions:
        values["fix"] = "it loads all the same; `quantmint schemes` shows what runs as it is stored"
        return Outcome("warn", f"{found}: {'; '.join(cautions)}", values)
    return Outcome("ok", found, values)


def _scheme(wanted: Wanted) -> str:
    return "16 bit" if wanted.scheme == "none" else wanted.scheme
