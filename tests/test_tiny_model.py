"""The embedded tiny model is a measuring instrument, and this holds it to that.

On two thousand questions with four answers each it must be good in 16 bit, stay good under per-token FP8 with an FP8
cache, and visibly lose under MXFP4 rounded to nearest. The schemes are simulated in plain PyTorch, away from the
product's own kernels, so that a fault in those cannot hide here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "recipes" / "tiny" / "model"
TASKS = ROOT / "eval" / "tasks"
CALIBRATION = ROOT / "calibration" / "data" / "tiny.jsonl"
FP8_MAX = 448.0


def fp8(x: Any, scale: Any) -> Any:
    """Round to e4m3 at a scale and come back; values past the range saturate."""
    scaled = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def fp8_rows(x: Any) -> Any:
    """Round the last dimension to e4m3 with a scale of its own for each row: a weight's channels, or tokens."""
    return fp8(x, (x.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-12))


def mxfp4(x: Any) -> Any:
    """Round groups of 32 along the last dimension to E2M1 with a power-of-two scale, to nearest."""
    groups = x.float().unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))
    # frexp's mantissa lies in [0.5, 1): 0.875 there is the 1.75 from which the exponent rounds up.
    scale = torch.exp2((exponent - 1 + (mantissa >= 0.875) - 2).float())
    scaled = groups / scale
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = (torch.round(scaled / step) * step).clamp(-6, 6)
    return (rounded * scale).flatten(-2).to(x.dtype)


@dataclass
class Cache:
    """The attention's key and value ranges: watched while calibrating, then used as static scales."""

    amax: dict[tuple[int, str], float] = field(default_factory=dict)
    frozen: bool = False

    def __call__(self, layer: int, name: str, x: Any) -> Any:
        if self.frozen:
            return fp8(x, self.amax[layer, name] / FP8_MAX)
        self.amax[layer, name] = max(self.amax.get((layer, name), 0.0), float(x.abs().max()))
        return x


def watch_cache(model: Any, cache: Cache) -> None:
    """Send every key after RoPE, and every value, through ``cache``."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        key, value = cache(module.layer_idx, "k", key), cache(module.layer_idx, "v", value)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("watched", attention)
    model.set_attn_implementation("watched")


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # Its 16-bit numbers, multiplied in float32: bfloat16 takes five times as long on processors without AVX-512.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def quantize(model: Any, weight: Callable[[Any], Any], inputs: Callable[[Any], Any] | None = None) -> Any:
    """Round the weights of attention and MLP in place, and their inputs on the way in; embeddings and head stay."""
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = weight(module.weight.data)
            if inputs is not None:
                module.register_forward_pre_hook(lambda _, args: (inputs(args[0]),))
            assert "layers." in name
    return model


@dataclass(frozen=True)
class Questions:
    """Questions as padded tokens, with the tokens of their four one-token answers."""

    ids: Any
    last: Any
    choices: Any
    answers: Any


def questions(tokenizer: Any, records: list[dict[str, Any]]) -> Questions:
    prompts = tokenizer([r["question"] for r in records], add_special_tokens=False)["input_ids"]
    width = max(len(ids) for ids in prompts)
    choices = []
    for record, prompt in zip(records, prompts, strict=True):
        whole = tokenizer([f"{record['question']} {c}" for c in record["choices"]], add_special_tokens=False)[
            "input_ids"
        ]
        assert all(ids[:-1] == prompt for ids in whole), record
        choices.append([ids[-1] for ids in whole])
    return Questions(
        ids=torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in prompts]),
        last=torch.tensor([len(ids) - 1 for ids in prompts]),
        choices=torch.tensor(choices),
        answers=torch.tensor([r["answer"] for r in records]),
    )


def correct(model: Any, asked: Questions) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which questions the model answers right, bool [n]."""
    hits = []
    with torch.inference_mode():
        for start in range(0, len(asked.ids), 500):
            part = slice(start, start + 500)
            hidden = model.model(input_ids=asked.ids[part], use_cache=False).last_hidden_state
            picked = hidden[torch.arange(len(hidden)), asked.last[part]]
            logits = model.lm_head(picked).float().gather(1, asked.choices[part])
            hits.append(logits.argmax(1) == asked.answers[part])
    return torch.cat(hits).numpy()


@dataclass(frozen=True)
class Change:
    """A candidate against the baseline on the same questions."""

    accuracy: float
    flips: float
    delta: float
    low: float
    high: float


def change(baseline: Any, candidate: Any) -> Change:
    d = candidate.astype(float) - baseline.astype(float)
    half = 1.96 * d.std(ddof=1) / math.sqrt(len(d))
    return Change(
        float(candidate.mean()), float((d != 0).mean()), float(d.mean()), float(d.mean() - half), float(d.mean() + half)
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ptpc(folder: Path, texts: list[str], tokenizer: Any) -> Any:
    """FP8 per channel and per token, with an FP8 cache at scales calibrated on the 16-bit model."""
    model, cache = load(folder), Cache()
    watch_cache(model, cache)
    rows = tokenizer(texts, truncation=True, max_length=96, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        model.model(input_ids=torch.tensor(rows), use_cache=False)
    cache.frozen = True
    return quantize(model, fp8_rows, fp8_rows)


@dataclass(frozen=True)
class Instrument:
    """The model's answers in 16 bit, and what reads them again."""

    tokenizer: Any
    asked: Questions
    baseline: Any


@pytest.fixture(scope="module")
def instrument() -> Instrument:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = questions(tokenizer, read(TASKS / "tiny_facts.jsonl"))
    return Instrument(tokenizer, asked, correct(load(MODEL), asked))


def test_bf16_knows_the_world_but_not_by_wide_margins(instrument: Instrument) -> None:
    assert len(instrument.baseline) >= 1000
    assert instrument.asked.choices.shape[1] == 4
    assert 0.90 <= instrument.baseline.mean() < 1.0


def test_answers_are_spread_evenly(instrument: Instrument) -> None:
    counts = np.bincount(instrument.asked.answers.numpy(), minlength=4)
    assert counts.min() > 0.2 * counts.sum()


@pytest.mark.slow
def test_fp8_with_an_fp8_cache_stays_within_a_point(instrument: Instrument) -> None:
    texts = [r["text"] for r in read(CALIBRATION)[:32]]
    seen = change(instrument.baseline, correct(ptpc(MODEL, texts, instrument.tokenizer), instrument.asked))
    assert abs(seen.delta) <= 0.01, seen
    assert seen.flips < 0.03, seen


def test_mxfp4_rounded_to_nearest_loses_visibly(instrument: Instrument) -> None:
    seen = change(instrument.baseline, correct(quantize(load(MODEL), mxfp4), instrument.asked))
    assert seen.high < 0, seen
    assert seen.delta > -0.15, seen


def test_broken_weights_fall_to_chance(instrument: Instrument) -> None:
    hits = correct(quantize(load(MODEL), lambda w: w.flip(0)), instrument.asked)
    assert hits.mean() < 0.4


def test_simulated_mxfp4_agrees_with_values_worked_out_by_hand() -> None:
    x = torch.zeros(1, 32)
    x[0, :7] = torch.tensor([7.0, 6.9, 5.0, 2.5, 0.25, 0.75, -1.75])
    # amax 7 = 1.75 * 4 rounds the exponent up: scale 2, so 7 -> 3.5 -> 4 (tie to even) -> 8.
    assert mxfp4(x)[0, :7].tolist() == [8.0, 6.0, 4.0, 2.0, 0.0, 1.0, -2.0]
    x[0, 0] = 6.9
    # amax 6.9 keeps scale 1 and clips to 6.
    assert mxfp4(x)[0, :7].tolist() == [6.0, 6.0, 4.0, 2.0, 0.0, 1.0, -2.0]


def test_calibration_text_holds_no_question() -> None:
    text = "\n".join(r["text"] for r in read(CALIBRATION))
    asked = [r["question"] for task in ("tiny_facts", "tiny_recall") for r in read(TASKS / f"{task}.jsonl")]
    assert [q for q in asked if q in text] == []


def test_checkpoint_is_small_and_fits_the_schemes() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["head_dim"] == 64
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert all(config[key] % 64 == 0 for key in ("hidden_size", "intermediate_size", "vocab_size"))
    assert sum(p.stat().st_size for p in MODEL.iterdir()) <= 12e6


def test_tokenizer_spells_any_text_and_keeps_words_whole(instrument: Instrument) -> None:
    tokenizer = instrument.tokenizer
    assert len(tokenizer("12 + 7 = 19.")["input_ids"]) == 6
    assert tokenizer.decode(tokenizer(" Grüße, world!\n")["input_ids"]) == " Grüße, world!\n"
    assert tokenizer("12 + 7 = 19.")["input_ids"][:4] == tokenizer("12 + 7 =")["input_ids"]
