"""Find what a recipe asks for that cannot be made, served or proven, before any work.

refuse(check(load_recipe("llama70b-fp8kv"), config=config))
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quantmint.calibration.batches import require_texts
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.sets import load_set
from quantmint.eval import suites, workloads
from quantmint.eval.errors import DefinitionError
from quantmint.eval.records import is_path
from quantmint.eval.statistics.ranks import fewest_launches
from quantmint.eval.suites import Suite
from quantmint.eval.workloads import Workload
from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.base.hardware import refusal
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.base.schemes import table as schemes
from quantmint.pipeline.quantize.budget import fastest
from quantmint.pipeline.quantize.engines.algorithms import algorithm
from quantmint.pipeline.quantize.model.loader import fusion_names, load_view
from quantmint.pipeline.recipe import modules
from quantmint.pipeline.recipe.faults import Fault, YamlPath
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.sections import Evaluation, Gate
from quantmint.pipeline.serving.knobs import table as knobs
from quantmint.pipeline.serving.knobs.overrides import check_arguments
from quantmint.pipeline.serving.model.facts import schemes_of_experts
from quantmint.pipeline.stages.long_context import long_faults
from quantmint.pipeline.stages.reasoning import reasoning_faults
from quantmint.pipeline.stages.runtime_faults import runtime_faults
from quantmint.pipeline.stages.tool_calls import tool_faults

_LEAST_TUNED = 8
"""Samples, of which an eighth is held out from tuning."""


def check(
    loaded: LoadedRecipe,
    *,
    config: Mapping[str, Any] | None = None,
    linear: Mapping[str, tuple[int, int]] | None = None,
    cpu_flags: Collection[str] | None = None,
    judged: bool = True,
) -> list[Fault]:
    """Return every fault of a recipe that follows from its fields, the model and the definitions that it names.

    `config` is the model's config.json and `linear` its linear modules with [out_features, in_features]; checks that
    need them are skipped without them. `cpu_flags` are those of the CPU that will serve, where the target is one
    (`pipeline.base.hardware.local_cpu_flags`). Without `judged` the suite, its margins and the promised throughput are
    not checked.
    """
    faults = [
        *_source(loaded),
        *_ranges(loaded),
        *_schemes(loaded, config, cpu_flags),
        *_proposals(loaded, cpu_flags),
        *_definitions(loaded, judged=judged),
    ]
    faults += runtime_faults(loaded) if judged else ()
    faults += [
        *_kv_granularity(loaded),
        *_serve(loaded),
        *_overlaps(loaded, linear),
        *_objective(loaded),
    ]
    names = linear if linear is not None else modules.expected_names(config) if config is not None else ()
    faults += _fused(loaded, names, config)
    return faults if config is None else [*faults, *_model(loaded, modules.text_config(config))]


def _used(loaded: LoadedRecipe) -> list[tuple[YamlPath, str]]:
    """Return (place in the recipe, scheme) of every scheme that a recipe names."""
    quantization = loaded.recipe.quantization
    schemes: dict[YamlPath, str] = {("from", index): name for index, name in enumerate(quantization.from_ or ())}
    schemes = schemes or {("scheme",): quantization.scheme}
    schemes |= {
        ("overrides", index, "scheme"): override.scheme for index, override in enumerate(quantization.overrides)
    }
    return [(("quantization", *path), name) for path, name in schemes.items()]


def _source(loaded: LoadedRecipe) -> Iterator[Fault]:
    recipe = loaded.recipe
    if recipe.trust_remote_code and recipe.source.repo is not None and not recipe.source.pinned:
        yield loaded.fault(
            ("trust_remote_code",),
            f'found true with revision "{recipe.source.revision}", expected a 40-digit commit: '
            "code that is run must not be able to change",
        )
    folder = loaded.source_folder
    if folder is not None and not folder.is_dir():
        yield loaded.fault(("source", "folder"), f"found no folder {folder}, expected one with a model")


def _ranges(loaded: LoadedRecipe) -> Iterator[Fault]:
    quantization = loaded.recipe.quantization
    if (section := loaded.recipe.calibration) is not None:
        static = any(scheme(name).needs_ranges for _, name in _used(loaded))
        if section.observer != "amax" and static and quantization.parameters.get("scaling"):
            yield loaded.fault(
                ("calibration", "observer"),
                f"found {section.observer} with scaling, expected amax: what enters scaled channels is measured "
                "again, by its largest magnitude",
            )
        return
    expected = "expected a calibration section, because its scales are measured"
    if quantization.from_ is not None:
        message = "found auto without calibration, expected a calibration section, because costs are measured"
        yield loaded.fault(("quantization", "scheme"), message)
    for path, name in _used(loaded):
        if scheme(name).needs_ranges:
            yield loaded.fault(path, f"found {name} without calibration, {expected}")
    if quantization.kv_cache == "fp8":
        yield loaded.fault(("quantization", "kv_cache"), f"found fp8 without calibration, {expected}")
    if algorithm(quantization.algorithm).calibrated:
        yield loaded.fault(
            ("quantization", "algorithm"),
            f"found {quantization.algorithm} without calibration, expected a calibration section, "
            "because it looks at activations",
        )


def _schemes(
    loaded: LoadedRecipe, config: Mapping[str, Any] | None, cpu_flags: Collection[str] | None
) -> Iterator[Fault]:
    hardware, quantization = loaded.recipe.target.hardware, loaded.recipe.quantization
    layout, kv_cache = quantization.format, quantization.kv_cache
    # A CPU with the reference runtime only lends its arithmetic: what vLLM's CPU build has no kernel for may be made
    # and proven there. A GPU is what the checkpoint is made for, whatever answers the questions.
    by_reference = loaded.recipe.evaluation.runtime == "reference"
    served = not (by_reference and accelerators.hardware(hardware).kind == "cpu")
    # Ours leaves modules that its algorithm is not made for to the nearest, and names them, if it is made for others.
    carried = quantization.engine == "stream" and any(
        algorithm(quantization.algorithm).refusal("stream", name) is None for _, name in _used(loaded)
    )
    of_experts = frozenset[str]() if config is None else schemes_of_experts(quantization, config)
    for path, name in _used(loaded):
        row = scheme(name)
        if layout not in row.formats:
            expected, why = " or ".join(row.formats), dict(row.refused)[layout]
            yield loaded.fault(path, f"found {name} in {layout}, expected format {expected}: {why}")
            continue
        if quantization.from_ is not None and row.refusal("stream", layout) is not None:
            yield loaded.fault(path, f"found {name}, expected a scheme that engine stream makes, which measures it")
            continue
        loads = partial(refusal, hardware, name, expert_schemes=of_experts & {name}, cpu_flags=cpu_flags)
        reason = loads("auto", layout) if served else None
        if reason is not None:
            yield loaded.fault(path, f"found {name}, which {hardware} cannot serve: {reason}")
        elif served and (reason := loads(kv_cache, layout)) is not None:
            yield loaded.fault(
                ("quantization", "kv_cache"), f"found {kv_cache}, which {hardware} cannot serve: {reason}"
            )
        engine = quantization.engine
        if (reason := row.refusal(engine, layout)) is not None:
            field = path if engine not in row.engines else ("quantization", "engine")
            yield loaded.fault(field, f"{reason}, expected {' or '.join(row.makers(layout))}")
        elif (reason := algorithm(quantization.algorithm).refusal(engine, name)) is not None and not carried:
            yield loaded.fault(("quantization", "algorithm"), reason)


def _proposals(loaded: LoadedRecipe, cpu_flags: Collection[str] | None) -> Iterator[Fault]:
    """Yield faults for schemes of a predictor or a draft that the layout does not hold or the target cannot serve."""
    recipe = loaded.recipe
    hardware, layout = recipe.target.hardware, recipe.quantization.format
    named: dict[YamlPath, str | None] = {
        ("quantization", "mtp"): recipe.quantization.predictor_scheme,
        ("draft", "scheme"): None if recipe.draft is None else recipe.draft.scheme,
    }
    served = not (recipe.evaluation.runtime == "reference" and accelerators.hardware(hardware).kind == "cpu")
    for path, name in named.items():
        row = None if name is None else scheme(name)
        if row is None or name is None:
            continue
        if layout not in row.formats:
            expected, why = " or ".join(row.formats), dict(row.refused)[layout]
            yield loaded.fault(path, f"found {name} in {layout}, expected format {expected}: {why}")
        elif served and (reason := refusal(hardware, name, "auto", layout, cpu_flags=cpu_flags)) is not None:
            yield loaded.fault(path, f"found {name}, which {hardware} cannot serve: {reason}")


def _objective(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Yield a fault for a speedup that the target's data sheet cannot predict, or that it rules out."""
    recipe, machines = loaded.recipe, accelerators.table()
    speedup, machine = recipe.quantization.speedup, machines[recipe.target.hardware]
    if speedup is None:
        return
    if machine.bandwidth is None:
        some = ", ".join(name for name, row in machines.items() if row.bandwidth is not None)
        message = f"found throughput for {machine.name}, whose bandwidth and arithmetic are not known, expected {some}"
        yield loaded.fault(("quantization", "objective"), message)
        return
    for path, name in _used(loaded):
        if not machine.multiplies(name):
            able = ", ".join(
                scheme_name
                for scheme_name, row in schemes().items()
                if "stream" in row.engines and machine.multiplies(scheme_name)
            )
            fault = f"found {name}, which {machine.name} unpacks to 16 bit before it multiplies"
            yield loaded.fault(path, f"{fault}, expected for `objective: throughput` one of {able}")
            return
    most = fastest(machine, [name for _, name in _used(loaded)])
    if speedup > most:
        fault = f"found {speedup:g}, expected at most {most:.4g}"
        yield loaded.fault(
            ("quantization", "speedup"), f"{fault}: no scheme gains more on {machine.name} by its figures"
        )


def _kv_granularity(loaded: LoadedRecipe) -> Iterator[Fault]:
    quantization = loaded.recipe.quantization
    written = quantization.kv_cache, quantization.format, quantization.engine
    if quantization.kv_cache_granularity != "tensor" and written != ("fp8", "compressed-tensors", "stream"):
        yield loaded.fault(
            ("quantization", "kv_cache_granularity"),
            "found head, expected tensor, or kv_cache fp8 in format compressed-tensors by engine stream",
        )


def _serve(loaded: LoadedRecipe) -> Iterator[Fault]:
    serve = loaded.recipe.serve
    knob_table = knobs.table() if serve.knobs else {}
    for name in serve.knobs:
        at: YamlPath = ("serve", "knobs", name)
        knob, message = knob_table.get(name), ""
        if knob is None:
            message = f"found no such knob, expected one of docs/serving-knobs.md{did_you_mean(name, knob_table)}"
        elif knob.kind not in ("flag", "env"):
            message = f"found a setting of the {knob.kind}, expected an argument of `vllm serve` or a variable"
        if message:
            yield Fault(loaded.place(*at, key=True), at, message)
    try:
        check_arguments(serve.arguments)
    except UserError as error:
        yield loaded.fault(("serve", "arguments"), error.message)
    draft = loaded.draft_folder
    if draft is not None and not (draft / "config.json").is_file():
        yield loaded.fault(("draft", "folder"), f"found no config.json in {draft}, expected a draft's folder")
    table = loaded.tunableop
    if table is not None and not table.is_file():
        yield loaded.fault(("serve", "tunableop"), f"found no file {table}, expected a CSV of TunableOp")


def _definitions(loaded: LoadedRecipe, *, judged: bool) -> Iterator[Fault]:
    recipe = loaded.recipe
    if recipe.calibration is not None:
        try:
            section = recipe.calibration
            require_texts(load_set(section.set), samples=section.samples, packing=section.packing)
        except CalibrationError as error:
            yield loaded.fault(("calibration", "set"), str(error))
    workload: Workload | None = None
    try:
        workload = workloads.load(recipe.target.workload)
    except DefinitionError as error:
        yield loaded.fault(("target", "workload"), str(error))
    if workload is not None and workload.longest > recipe.target.max_model_len:
        yield loaded.fault(
            ("target", "max_model_len"),
            f"found {recipe.target.max_model_len}, expected at least {workload.longest}: "
            f"workload {recipe.target.workload} has requests of that many tokens",
        )
    if workload is not None and recipe.quantization.objective and _paced(workload):
        fault = f"found {workload.name}, whose cells all offer a fixed rate of requests"
        yield loaded.fault(("target", "workload"), f"{fault}, expected one to estimate throughput of")
    if not judged:
        return
    try:
        suite = suites.load(recipe.evaluation.suite)
        yield from accuracy_faults(loaded, suite)
        if is_path(recipe.evaluation.suite) and (unknown := suites.strangers(suite)):
            at = f"{suite.path}: found task {', '.join(unknown)}, expected one of lm-eval's, or a file beside it"
            yield loaded.fault(("evaluation", "suite"), at)
        if not recipe.trust_remote_code and (reasons := suites.untrusted_tasks(suite)):
            at = f"{suite.path}: {'; '.join(reasons)}, which may run code: expected data only, or"
            yield loaded.fault(("evaluation", "suite"), f"{at} `trust_remote_code: true` where you trust its author")
    except DefinitionError as error:
        yield loaded.fault(("evaluation", "suite"), str(error))
    yield from throughput_faults(loaded, workload)
    yield from tool_faults(loaded)
    yield from long_faults(loaded)
    yield from reasoning_faults(loaded)


def _overlaps(loaded: LoadedRecipe, linear: Iterable[str] | None) -> Iterator[Fault]:
    """Yield faults for overrides that give a module different schemes, or that match no module of ``linear``."""
    names = list(linear) if linear is not None else None
    claimed: dict[str, str] = {}
    for path, (pattern, chosen) in _overrides(loaded).items():
        modules_meant = [pattern] if names is None else [name for name in names if modules.matches(pattern, name)]
        if names is not None and not modules_meant:
            hint = did_you_mean(pattern, names)
            yield loaded.fault(path, f'found "{pattern}", expected linear modules of the model{hint}')
        clash = next((name for name in modules_meant if claimed.get(name, chosen) != chosen), None)
        if clash is not None:
            fault = f"found {chosen} for {clash} after {claimed[clash]}"
            yield loaded.fault(path, f"{fault}, expected one scheme for a module")
        claimed.update(dict.fromkeys(modules_meant, chosen))


def _overrides(loaded: LoadedRecipe) -> dict[YamlPath, tuple[str, str]]:
    """Return each override's (pattern, scheme) by the pattern's place in the recipe."""
    return {
        ("quantization", "overrides", index, "modules", position): (pattern, override.scheme)
        for index, override in enumerate(loaded.recipe.quantization.overrides)
        for position, pattern in enumerate(override.modules)
    }


def _fused(loaded: LoadedRecipe, names: Iterable[str], config: Mapping[str, Any] | None) -> Iterator[Fault]:
    """Yield one fault for each exclusion or override that splits modules which vLLM loads as one.

    ``names`` are the model's linear modules; ``config`` is None where it is not known.
    """
    quantization = loaded.recipe.quantization
    rules: dict[YamlPath, str] = {
        ("quantization", "exclude", index): pattern for index, pattern in enumerate(quantization.exclude)
    }
    rules |= {path: pattern for path, (pattern, _) in _overrides(loaded).items()}
    if not rules:
        return
    named = [name for pattern in rules.values() if not pattern.startswith("re:") for name in modules.siblings(pattern)]
    groups: defaultdict[str, list[str]] = defaultdict(list)
    view = None if config is None else load_view(config)
    for name in dict.fromkeys((*names, *named)):
        for group in fusion_names(name, view):
            groups[group].append(name)
    reported: set[YamlPath] = set()
    for group, members in groups.items():
        chosen = {name: modules.assigned(quantization, name) or "16 bit" for name in members}
        if len(set(chosen.values())) == 1:
            continue
        for path, pattern in rules.items():
            modules_meant = [name for name in members if modules.matches(pattern, name)]
            if path in reported or not 0 < len(modules_meant) < len(members):
                continue
            reported.add(path)
            outside = next(name for name in members if chosen[name] != chosen[modules_meant[0]])
            yield loaded.fault(
                path,
                f"found {chosen[modules_meant[0]]} for {modules_meant[0]} beside {chosen[outside]} for {outside}, "
                f"expected one scheme for {group}, which vLLM loads as one",
            )


def _model(loaded: LoadedRecipe, config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield faults against the model's text config: lengths, few samples for GPTQ, an FP8 latent cache, widths."""
    recipe = loaded.recipe
    quantization, longest = recipe.quantization, config.get("max_position_embeddings")
    lengths: list[tuple[YamlPath, int]] = [(("target", "max_model_len"), recipe.target.max_model_len)]
    if recipe.calibration is not None:
        lengths.append((("calibration", "sequence_length"), recipe.calibration.sequence_length))
    for path, found in lengths:
        if isinstance(longest, int) and found > longest:
            yield loaded.fault(path, f"found {found}, expected at most {longest}, the model's max_position_embeddings")
    if quantization.by_layers and recipe.calibration is not None:
        length = recipe.calibration.sequence_length
        widest, name = max(((features, name) for name, features, _ in _widths(config)), default=(0, ""))
        if quantization.algorithm == "tuned" and recipe.calibration.samples < _LEAST_TUNED:
            few = f"found {recipe.calibration.samples}, expected at least {_LEAST_TUNED}"
            yield loaded.fault(("calibration", "samples"), f"{few}: an eighth or more is held out from tuning")
        if (least := -(-widest // length)) > recipe.calibration.samples:
            few = f"found {recipe.calibration.samples} of {length} tokens, expected at least {least}"
            yield loaded.fault(("calibration", "samples"), f"{few}: a Hessian of {name} {widest} takes as many tokens")
    rank = config.get("kv_lora_rank")
    if quantization.kv_cache == "fp8" and rank is not None:
        # vLLM caches one latent for all heads with one rotated part, by a scale of 1.0: neither layout has scales for
        # these, and calibration proves that nothing clips.
        latent = f"for latent attention (kv_lora_rank {rank})"
        if quantization.engine != "stream":
            fault = f"found fp8 {latent} with engine {quantization.engine}, expected auto: that engine does not measure"
            yield loaded.fault(("quantization", "kv_cache"), f"{fault} whether the latent fits FP8 without a scale")
        elif quantization.kv_cache_granularity == "head":
            fault = f"found head {latent}, expected tensor: all heads share one latent"
            yield loaded.fault(("quantization", "kv_cache_granularity"), fault)
        if recipe.evaluation.runtime == "reference":
            fault = f"found reference with kv_cache fp8 {latent}, expected vllm"
            yield loaded.fault(("evaluation", "runtime"), f"{fault}: the reference runtime has no FP8 cache of latents")
    for path, name in _used(loaded):
        divisor, gpus = scheme(name).input_divisor, recipe.target.gpus
        for width, features, split in _widths(config):
            over = f" over {gpus} GPUs" if features % divisor == 0 else ""
            if features % (divisor * gpus if split else divisor):
                found_width = f"found {name} with {width} {features}{over}"
                yield loaded.fault(path, f"{found_width}, expected a multiple of {divisor} on each GPU")
                break
        heads, size = config.get("num_key_value_heads"), _head_size(config)
        keys_are_kept = modules.is_excluded(quantization, "model.layers.0.self_attn.k_proj")
        if isinstance(heads, int) and size is not None and not rank and not keys_are_kept:
            # vLLM gives every GPU whole heads, and at least one (vLLM 0.32 fp8_utils.py, validate_fp8_block_shape).
            rows, divisor = max(heads // gpus, 1) * size, scheme(name).row_divisor
            if rows % divisor:
                share = f"{rows} rows of k_proj" + (f" on each of {gpus} GPUs" if gpus > 1 else "")
                joined = "vLLM loads it in one matrix with q_proj and v_proj; exclude them together"
                yield loaded.fault(path, f"found {name} with {share}, expected a multiple of {divisor}: {joined}")


def _widths(config: Mapping[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """Yield (name, in_features, is split) of layer inputs that a text config declares.

    "Is split" says whether tensor parallelism gives each GPU only a share of the width.
    """
    for key in ("hidden_size", "q_lora_rank", "kv_lora_rank", "intermediate_size", "moe_intermediate_size"):
        sizes = config.get(key)
        for size in dict.fromkeys(sizes) if isinstance(sizes, list) else (sizes,):  # Gemma 3n: one for each layer
            if size and isinstance(size, int):
                yield key, size, "intermediate" in key
    heads, head = config.get("num_attention_heads"), config.get("v_head_dim") or _head_size(config)
    if isinstance(heads, int) and isinstance(head, int) and heads:
        yield "num_attention_heads x head_dim", heads * head, True


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Return head_dim, else hidden_size / num_attention_heads; None where the config has neither."""
    heads, hidden, size = (config.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
    if isinstance(size, int) and size:
        return size
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else None


def accuracy_faults(loaded: LoadedRecipe, suite: Suite) -> Iterator[Fault]:
    """Yield faults for margins that the suite cannot test, unknown task names, and answers beyond the context."""
    gate = loaded.recipe.gate.accuracy
    suite = suite.judged_by(gate.margins)
    if not any(task.gated for task in suite.tasks):
        yield loaded.fault(("gate", "accuracy", "margins"), "found null for every task that decides, expected one left")
    questions = loaded.recipe.judged(as_asked(suite, loaded.recipe.evaluation, loaded.recipe.gate))
    looks = loaded.recipe.evaluation.looks
    for sentence in suites.untestable(questions, gate.margin, loaded.recipe.confidence, gate.power, looks):
        yield loaded.fault(("gate", "accuracy", "margin"), sentence)
    task_names = [task.task for task in suite.tasks]
    named = [("baseline_score", name) for name in gate.baseline_score] + [("margins", name) for name in gate.margins]
    for field, name in named:
        if name not in task_names:
            yield loaded.fault(
                ("gate", "accuracy", field, name),
                f"found no such task in suite {suite.name}, "
                f"expected one of {', '.join(task_names)}{did_you_mean(name, task_names)}",
            )
    answer = max((task.max_gen_tokens or 0 for task in suite.tasks), default=0)
    if answer >= loaded.recipe.target.max_model_len:
        yield loaded.fault(
            ("target", "max_model_len"),
            f"found {loaded.recipe.target.max_model_len}, expected more than {answer}: "
            f"suite {suite.name} lets a model answer with that many tokens",
        )


def _paced(workload: Workload) -> bool:
    """Return whether every cell offers a fixed rate of requests, so that no throughput can be measured."""
    return all(math.isfinite(cell.rate or math.inf) for cell in workload.cells)


def throughput_faults(loaded: LoadedRecipe, workload: Workload | None) -> Iterator[Fault]:
    """Yield faults for a `min_ratio` that nothing measures, or that too few launches cannot prove.

    `workload` is None where it is not known.
    """
    gate = loaded.recipe.gate.throughput
    if gate.min_ratio is None:
        return
    promise = ("gate", "throughput", "min_ratio")
    if loaded.recipe.evaluation.runtime == "reference":
        fault = f"found {gate.min_ratio:g} with evaluation.runtime reference"
        yield loaded.fault(promise, f"{fault}, expected null: that runtime measures no throughput")
    elif workload is not None and _paced(workload):
        fault = f"found {gate.min_ratio:g}, but every cell of workload {workload.name} offers a fixed rate of requests"
        yield loaded.fault(promise, f"{fault}, expected null: latency is what such a load measures")
    fewest = fewest_launches(gate.confidence)
    if gate.launches < fewest:
        yield loaded.fault(
            ("gate", "throughput", "launches"),
            f"found {gate.launches}, expected at least {fewest}: with fewer on each side no outcome is significant at "
            f"{gate.confidence:.0%} confidence, however clear",
        )


def as_asked(suite: Suite, evaluation: Evaluation, gate: Gate) -> Suite:
    """Return the suite with the recipe's limit on items and its expected flip rate."""
    tasks = tuple(
        replace(
            task,
            items=min(task.items, evaluation.limit or task.items),
            expected_flip_rate=gate.accuracy.expected_flip_rate or task.expected_flip_rate,
        )
        for task in suite.tasks
    )
    return replace(suite, tasks=tasks)
