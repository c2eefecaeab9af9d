"""kl: both sides read held-out prompts, and their next-token distributions are compared at some positions (`eval.kl`).

The reference runtime compares the whole vocabulary: the baseline's stage leaves its log probabilities in files that the
candidate's process reads. vLLM gives the likeliest tokens; the baseline draws one at each position, and the candidate
is asked what it gives to those that no list has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from quantmint.eval import prompts
from quantmint.eval.canary import Answer
from quantmint.eval.errors import MeasurementError
from quantmint.eval.kl import Divergences, TextDivergence, measure, places, sampled_divergence
from quantmint.eval.records import Record
from quantmint.pipeline.base.errors import InvalidMeasurementError
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.modules import text_config
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.canary import LIKELIEST, read_prompt, tokenized
from quantmint.pipeline.stages.estimate import READ_S, TOKEN_BYTES, Estimate
from quantmint.pipeline.stages.paired import PairedStage, prompt_settings
from quantmint.pipeline.stages.serve import launch_plan, runtime_modules
from quantmint.pipeline.stages.servers import ReferenceServer
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Output, read_gzip, write_gzip, write_json

DIVERGENCES: Final = "divergences.json"
_TEXTS: Final = "texts.json.gz"
_IN_FLIGHT, _TIMEOUT_S = 16, 600.0
_DRAW_S: Final = 0.005
"""Seconds of a server's own work for a token that is drawn after the beginning of a text."""
_UNLISTED: Final = 0.15
"""Share of drawn tokens that is taken to be in no list, of which each takes a request more."""


@dataclass(frozen=True, slots=True)
class ReadText(Record):
    """A text as the baseline read it: its tokens' ``ids``, and the ``places`` at which distributions are compared.

    ``answer`` is what vLLM gave for it, ``samples`` a token drawn at each place with its log probability in nats. They
    are None and empty where the log probabilities of the vocabulary are in a file.
    """

    name: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    answer: Answer | None = None
    samples: tuple[tuple[int, float], ...] = ()


class KlStage(PairedStage):
    """Measure the divergence of next-token distributions on held-out prompts.

    The baseline's answers depend on the model alone, so all recipes of it share them.
    """

    family = "kl"

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe promises a divergence."""
        return super().is_planned(setting) and setting.recipe.gate.kl is not None

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of what must be installed here: transformers, and what the runtime imports."""
        return (("evaluate", "transformers"), *runtime_modules(setting))

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of reading all texts one after the other, and each place's beginning for a drawn token."""
        tokens = [len(prompt.text) / TOKEN_BYTES for prompt in prompts.load(estimate.setting.suite.canary)]
        reading = sum(READ_S + count * estimate.position for count in tokens)
        if estimate.by_reference:
            return reading
        beginnings = sum(len(places(round(count))) * (_DRAW_S + count / 2 * estimate.token) for count in tokens)
        return reading + (1.0 if self.side == "baseline" else _UNLISTED) * beginnings

    def disk(self, setting: Setting, size: Prediction, begun: int) -> Mapping[str, int]:
        """Return the bytes of the vocabulary's log probabilities, which the reference runtime's baseline leaves."""
        if self.side == "candidate" or setting.recipe.evaluation.runtime != "reference":
            return {}
        tokens = [len(prompt.text) // TOKEN_BYTES for prompt in prompts.load(setting.suite.canary)]
        count = sum(len(places(count)) for count in tokens)
        vocabulary = int(text_config(setting.config).get("vocab_size") or 0)
        return {"log probabilities of the vocabulary": max(0, 4 * count * vocabulary - begun)}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return what determines the answers; the promised maximum is the gate's alone."""
        if self.side == "candidate":
            return {"side": self.side}
        return {
            "side": self.side,
            **prompt_settings(setting),
            "likeliest": LIKELIEST,
        }

    def run(self, job: Job) -> Output:
        """Read the texts and record the baseline's distributions, or compare with them; the divergence of each text."""
        folder = model_folder(job.inputs["model"])
        server = job.servers.get(self.side, launch_plan(job.setting, self.side, folder))
        return _read(job, server, folder) if self.side == "baseline" else _compared(job, server)


def read_divergences(folder: Path) -> Divergences:
    """Return the divergences that the candidate's stage recorded in ``folder``."""
    return Divergences.from_json(read_json(folder / DIVERGENCES))


def _read(job: Job, server: RunningServer, folder: Path) -> Output:
    """Let the baseline read the prompts, and record what it says at the compared places.

    Raises `InvalidMeasurementError` where its log probabilities are not finite, `MeasurementError` for fewer than two
    texts.
    """
    texts = [(name, ids) for name, ids in tokenized(job.setting, folder) if len(ids) > 1]
    if len(texts) < 2:
        raise MeasurementError(f"kl: found {len(texts)} prompts of two tokens or more, expected two prompts at least")
    read: list[ReadText] = []
    with job.progress.bar(len(texts), "texts") as advance:
        for number, (name, ids) in enumerate(texts):
            text = ReadText(name, ids, places(len(ids)))
            if isinstance(server, ReferenceServer):
                path = str(job.path / _file_of(number))
                server.ask("keep_logprobs", ids=list(ids), places=list(text.places), path=path)
            else:
                text = answered(server, text)
            read.append(text)
            advance(1)
    write_gzip(job.path / _TEXTS, [text.to_json() for text in read])
    positions = sum(len(text.places) for text in read)
    return Output(result={"positions": positions}, summary=f"{len(read)} texts, {positions:,} positions")


def answered(server: RunningServer, text: ReadText) -> ReadText:
    """Return the text with vLLM's answer, and with a token drawn at each place at temperature 1.

    All places of a text are one request, whose prompts would share a seed, and so have no seed.
    """
    answer = read_prompt(server, text.name, text.ids)
    if not answer.actual:
        raise InvalidMeasurementError(f"kl: the baseline has no finite log probabilities for prompt {text.name!r}.")
    body = {
        "model": server.model_name,
        "prompt": [list(text.ids[: place + 1]) for place in text.places],
        "max_tokens": 1,
        "logprobs": 0,
        "return_token_ids": True,
        # A model's generation_config.json would set others.
        **{"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1},
    }
    choices = json.loads(server.post("/v1/completions", body, timeout=_TIMEOUT_S))["choices"]
    samples = [
        (int(choice["token_ids"][0]), float(choice["logprobs"]["token_logprobs"][0]))
        for choice in sorted(choices, key=lambda choice: choice["index"])
    ]
    if len(samples) != len(text.places):
        raise MeasurementError(f"kl: {len(samples)} tokens were drawn for {text.name!r}, expected {len(text.places)}")
    return replace(text, answer=answer, samples=tuple(samples))


def _compared(job: Job, server: RunningServer) -> Output:
    folder = job.inputs["baseline"].path
    read = [ReadText.from_json(row) for row in read_gzip(folder / _TEXTS)]
    texts: list[TextDivergence] = []
    with job.progress.bar(len(read), "texts") as advance:
        for number, text in enumerate(read):
            if isinstance(server, ReferenceServer):
                path = str(folder / _file_of(number))
                values = server.ask("divergences", ids=list(text.ids), places=list(text.places), path=path)
                total = None if None in values else math.fsum(values)
                texts.append(TextDivergence(text.name, len(text.places), total))
            else:
                texts.append(text_divergence(server, text))
            advance(1)
    divergences = Divergences(isinstance(server, ReferenceServer), tuple(texts))
    write_json(job.path / DIVERGENCES, divergences.to_json())
    kl = measure(divergences)
    bound = "" if kl.upper is None else f", below {kl.upper:.3g} at {kl.confidence:.0%}"
    return Output(result={"kl": kl.value}, summary=f"KL {kl.value:.3g} nats{bound}, {kl.positions:,} positions")


def text_divergence(server: RunningServer, text: ReadText) -> TextDivergence:
    """Return the divergence of vLLM's ``server`` from the one that read ``text``, by its drawn tokens."""
    candidate, baseline = read_prompt(server, text.name, text.ids), text.answer
    assert baseline is not None  # noqa: S101 - vLLM's baseline has one
    if not candidate.actual:
        return TextDivergence(text.name, len(text.places), None)

    def at(place: int, sample: tuple[int, float]) -> float | None:
        token, logprob = sample
        listed = dict(zip(candidate.tokens[place], candidate.logprobs[place], strict=True))
        if token not in listed:
            # Only the last token's own log probability is read: a list at each position would cost ten times as much.
            answer = read_prompt(server, text.name, (*text.ids[: place + 1], token), likeliest=1)
            if not answer.actual:
                return None
            listed[token] = answer.actual[-1]
        return sampled_divergence(
            (baseline.tokens[place], baseline.logprobs[place]),
            (candidate.tokens[place], candidate.logprobs[place]),
            (token, logprob, listed[token]),
        )

    with ThreadPoolExecutor(_IN_FLIGHT, "kl") as pool:
        values = list(pool.map(at, text.places, text.samples))
    finite = [value for value in values if value is not None]
    return TextDivergence(text.name, len(text.places), math.fsum(finite) if len(finite) == len(values) else None)


def _file_of(number: int) -> str:
    return f"logprobs-{number:03}.npy"
