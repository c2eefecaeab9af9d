"""long: both sides read texts as long as the server allows; likelihood and KL by position, and hidden needles.

Requests are sent one at a time, as the canary's are. The baseline builds the texts with its tokenizer and reads them;
the candidate reads the baseline's token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from quantmint.calibration.batches import ended_texts, read_texts, rendered
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.sets import CalibrationSet, load_set
from quantmint.eval import long_context
from quantmint.eval.errors import MeasurementError
from quantmint.eval.long_context import LongDivergence, LongReadings, LongText
from quantmint.eval.records import checked, to_columns, to_rows
from quantmint.eval.suites import SuiteTask
from quantmint.pipeline.base.errors import InvalidMeasurementError, UserError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.endpoints import LongContext
from quantmint.pipeline.recipe.faults import Fault, refuse
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.modules import text_config
from quantmint.pipeline.stages import lm_eval
from quantmint.pipeline.stages.calibrate import pinned, set_identity
from quantmint.pipeline.stages.canary import LIKELIEST, read_prompt
from quantmint.pipeline.stages.estimate import READ_S, Estimate
from quantmint.pipeline.stages.paired import PairedStage
from quantmint.pipeline.stages.serve import (
    SERVER_LOG,
    faults,
    keep_log,
    launch_plan,
    require_server,
    runtime_modules,
    runtime_tools,
)
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Check, Job, Output, read_gzip, write_gzip, write_json

TEXTS, READINGS, DIVERGENCE = "texts.json.gz", "readings.json.gz", "divergence.json"
_ENTRY_S = 1.2e-5
"""Seconds of a log probability that vLLM makes, sends, and that is parsed here."""
_SMALL_SET = 64 << 20
"""Bytes of a local file of texts up to which it is tokenized before a run, to count its tokens."""


class LongContextStage(PairedStage):
    """Read long texts, and record the likelihood in each bucket of positions, the needles found, and the KL."""

    family = "long"

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe has this endpoint."""
        return super().is_planned(setting) and setting.recipe.evaluation.long is not None

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of what must be installed here: transformers, and what the runtime imports."""
        return (("evaluate", "transformers"), *runtime_modules(setting))

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server`, and for the baseline whether there are texts enough."""
        return (require_server, _require_texts) if self.side == "baseline" else (require_server,)

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the texts by content and how they are built; the candidate reads the baseline's."""
        if self.side == "candidate":
            return {"side": self.side}
        section, recipe = _section(setting), setting.recipe
        length = recipe.target.max_model_len
        return {
            "side": self.side,
            "set": set_identity(_set_name(setting.loaded), setting.commits),
            "skipped": _skipped(setting.loaded),
            "ends": list(section.ends(length)),
            "texts": section.texts,
            "needles": section.needles_of(length),
            "seed": recipe.evaluation.seed,
            "max_length": length,
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the runtime and, for the baseline, of the tokenizer's libraries."""
        tokenizes = versions("transformers", "tokenizers", "datasets") if self.side == "baseline" else {}
        return {**tokenizes, **runtime_tools(setting)}

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of reading all texts, with attention, whose products grow with the position."""
        section, length = _section(estimate.setting), estimate.setting.recipe.target.max_model_len
        tokens = section.ends(length)[-1]
        config = text_config(estimate.setting.config)
        layers, hidden = (int(config.get(name) or 0) for name in ("num_hidden_layers", "hidden_size"))
        # Scores and their product with the values: 4 operations for each element and position before, half of them on
        # average, beside the two for each parameter.
        attention = 1 + 4 * (tokens / 2) * hidden * layers / (2 * max(estimate.size.active, 1))
        entries = 0.0 if estimate.by_reference else _ENTRY_S * _likeliest(tokens)
        return section.texts * (READ_S + tokens * (estimate.position * attention + entries))

    def run(self, job: Job) -> Output:
        """Read the texts, record samples by task, and for the candidate the KL to its baseline.

        Raises `InvalidMeasurementError` where the baseline gives a number that is not finite.
        """
        setting, section = job.setting, _section(job.setting)
        ends = section.ends(setting.recipe.target.max_model_len)
        folder = model_folder(job.inputs["model"])
        baseline = job.inputs["baseline"].path if self.side == "candidate" else None
        texts = build_texts(setting, folder) if baseline is None else read_texts_of(baseline)
        likeliest = _likeliest(ends[-1])
        server = job.servers.get(self.side, launch_plan(setting, self.side, folder))
        readings = []
        with job.progress.bar(len(texts), "long texts") as advance:
            for text in texts:
                answer = read_prompt(server, text.name, text.ids, likeliest)
                if baseline is None and not answer.actual:
                    fault = f"long: the baseline has no finite log probabilities for {text.name}."
                    raise InvalidMeasurementError(fault)
                readings.append(long_context.reading(text, ends, answer))
                advance(1)
        collected = LongReadings(tuple(readings))
        if baseline is None:
            write_gzip(job.path / TEXTS, to_columns(LongText, texts))
        write_gzip(job.path / READINGS, collected.to_json())
        (job.path / lm_eval.SAMPLES).mkdir(exist_ok=True)
        settings = {"temperature": 0, "max_length": setting.recipe.target.max_model_len, "likeliest": likeliest}
        sets = long_context.sample_sets(texts, ends, collected, settings)
        tasks = self.tasks(setting)
        for task in tasks:
            write_json(lm_eval.samples_file(job.path, task), sets[task.task].to_json())
        scores = {task.task: sets[task.task].mean for task in tasks}
        result: dict[str, object] = {"scores": scores, "faults": faults(keep_log(server, job.path / SERVER_LOG))}
        retrieved = f"{scores[long_context.RETRIEVAL]:.0%} of the needles found"
        summary = f"{len(texts)} texts of {ends[-1]:,} tokens, {retrieved}"
        if baseline is not None:
            measured = long_context.divergences(texts, ends, read_readings(baseline), collected, likeliest)
            write_json(job.path / DIVERGENCE, measured.to_json())
            kl = [sum(bucket.sums) / max(sum(bucket.positions), 1) for bucket in measured.buckets]
            summary += f", KL by position {', '.join(f'{value:.2g}' for value in kl)} nats"
        return Output(result=result, summary=summary)

    def tasks(self, setting: Setting) -> tuple[SuiteTask, ...]:
        """Return the tasks of this endpoint."""
        return setting.recipe.endpoints[self.family]


def _section(setting: Setting) -> LongContext:
    section = setting.recipe.evaluation.long
    assert section is not None  # noqa: S101 - else there is no such stage
    return section


def _likeliest(tokens: int) -> int:
    """Return how many of the likeliest tokens are asked for at each position of a text."""
    return min(LIKELIEST, max(2, long_context.MOST_LOGPROBS // tokens))


def _set_name(loaded: LoadedRecipe) -> str:
    """Return the calibration set that long texts are joined from: the section's own, or the recipe's."""
    if loaded.long_set is not None:
        return loaded.long_set
    assert loaded.recipe.calibration is not None  # noqa: S101 - `long_faults` says so
    return loaded.recipe.calibration.set


def _skipped(loaded: LoadedRecipe) -> int:
    """Return the number of tokens at the beginning of the set that the recipe calibrates with; 0 for another set."""
    section = loaded.recipe.calibration
    return 0 if loaded.long_set is not None or section is None else section.samples * section.sequence_length


def build_texts(setting: Setting, folder: Path) -> tuple[LongText, ...]:
    """Return the texts by the tokenizer of the model in ``folder``.

    Raises `MeasurementError` where the set is too short, `CalibrationError` where it cannot be read.
    """
    from transformers import AutoTokenizer

    section, recipe, loaded = _section(setting), setting.recipe, setting.loaded
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=recipe.trust_remote_code)
    # In the order of the calibration, whose texts come first.
    calibration = None if loaded.long_set is not None else recipe.calibration
    seed = recipe.evaluation.seed if calibration is None else calibration.seed
    length = recipe.target.max_model_len
    ends = section.ends(length)
    return long_context.build(
        islice(_stream(pinned(_set_name(loaded)), tokenizer, seed), _skipped(loaded), None),
        lambda sentence: [int(token) for token in tokenizer(sentence, add_special_tokens=False)["input_ids"]],
        texts=section.texts,
        length=min(ends[-1], length - 1),
        needles=section.needles_of(length),
        seed=recipe.evaluation.seed,
    )


def _stream(chosen: CalibrationSet, tokenizer: Any, seed: int) -> Iterator[int]:
    special = not rendered(chosen, tokenizer)
    return chain.from_iterable(ended_texts(read_texts(chosen, tokenizer), tokenizer, seed, special_tokens=special))


def read_texts_of(folder: Path) -> tuple[LongText, ...]:
    """Return the texts that a baseline's stage recorded in ``folder``."""
    return tuple(checked(LongText, row) for row in to_rows(read_gzip(folder / TEXTS)))


def read_readings(folder: Path) -> LongReadings:
    """Return the readings that a stage recorded in ``folder``."""
    return LongReadings.from_json(read_gzip(folder / READINGS))


def read_divergence(folder: Path) -> LongDivergence:
    """Return the KL by position that a candidate's stage recorded in ``folder``."""
    return LongDivergence.from_json(read_json(folder / DIVERGENCE))


def long_faults(loaded: LoadedRecipe) -> list[Fault]:
    """Return faults of `evaluation.long` that follow from the recipe: lengths, and the set of its texts."""
    section, longest = loaded.recipe.evaluation.long, loaded.recipe.target.max_model_len
    if section is None:
        return []
    problems: list[Fault] = []
    at = ("evaluation", "long")
    if section.lengths is not None and section.lengths[-1] > longest:
        fault = f"found {section.lengths[-1]}, expected at most {longest}, the recipe's target.max_model_len"
        problems.append(loaded.fault((*at, "lengths", len(section.lengths) - 1), fault))
    if loaded.long_set is None and loaded.recipe.calibration is None:
        fault = "found no set of texts and no calibration, expected `set`, a calibration set: `long: {set: ultrachat}`"
        problems.append(loaded.fault(at, fault))
        return problems
    try:
        load_set(_set_name(loaded))
    except CalibrationError as error:
        problems.append(loaded.fault((*at, "set"), str(error)))
    return problems


def _require_texts(setting: Setting) -> None:
    """Raise `RecipeError` where a small local file has too few texts, by the tokenizer of a local source."""
    folder = setting.source.folder
    try:
        file = load_set(_set_name(setting.loaded)).file
        if folder is None or file is None or file.stat().st_size > _SMALL_SET:
            return
        build_texts(setting, folder)
    except (MeasurementError, CalibrationError) as error:
        refuse([setting.loaded.fault(("evaluation", "long"), str(error))])
    except OSError as error:
        raise UserError(f"{error.filename}: the texts cannot be read: {error.strerror}") from None
