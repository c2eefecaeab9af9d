"""What is swept by itself: the knobs of the table, by target and model."""

from __future__ import annotations

import pytest

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.knobs.table import table
from quantmint.pipeline.serving.tuning import space
from quantmint.pipeline.serving.tuning.space import default_axes, gated, label, option_axes

DENSE = {
    "attention": "mha",
    "family": "dense",
    "shared_experts": "no",
    "quantization": "fp8",
    "arch": "gfx942",
    "tp": "8",
}
#: Swept by another name, or only where somebody asks for it.
ELSEWHERE = {"--async-scheduling", "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"}


def axes(kind: str = "rocm", version: str = "0.33.0", **facts: str) -> dict[str, tuple[object, ...]]:
    found = default_axes(kind, facts=DENSE | facts, version=version, cores=16, concurrency=64)
    return {axis.knob: axis.values for axis in found}


def test_every_knob_of_the_file_is_one_of_the_table_and_the_reverse() -> None:
    named = {row["knob"] for rows in load_table(space.__file__, "sweeps.yaml").values() for row in rows}
    assert named <= table().keys()
    assert {name for name, knob in table().items() if knob.sweep} - ELSEWHERE <= named


def test_what_the_guides_say_to_sweep_comes_first() -> None:
    found = axes()
    assert list(found)[:5] == [
        "--max-num-batched-tokens",
        "--compilation-config",
        "--attention-backend",
        "--max-num-seqs",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    ]
    assert found["--max-num-batched-tokens"] == ("8192", "16384", "32768", "65536")
    modes = {label((("--compilation-config", value),)) for value in found["--compilation-config"]}  # type: ignore[arg-type]
    assert {"cudagraph_mode PIECEWISE", "cudagraph_mode FULL", "cudagraph_mode FULL_DECODE_ONLY"} <= modes


def test_backends_are_those_that_the_model_can_use() -> None:
    assert all("MLA" not in str(value) for value in axes()["--attention-backend"])
    assert all("MLA" in str(value) for value in axes(attention="mla", family="mla")["--attention-backend"])
    assert "ROCM_AITER_FA" not in axes(family="gpt-oss")["--attention-backend"]
    assert "--attention-backend" not in axes(attention="dsa", family="dsa")


def test_quick_reduce_needs_accelerators_that_add_up_and_is_gated() -> None:
    knob = "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
    assert knob not in axes(tp="1")
    assert knob in gated()
    assert {"--kv-cache-dtype", "--dtype"} <= gated()


def test_a_cpu_has_knobs_of_its_own() -> None:
    found = axes("cpu")
    assert found["OMP_NUM_THREADS"] == ("8", "16")
    assert found["--max-num-seqs"] == ("32", "128")
    assert found["--enforce-eager"] == (False,)
    assert not any(name.startswith(("VLLM_ROCM", "--attention-backend")) for name in found)


def test_given_knobs_are_checked_against_the_table() -> None:
    (axis,) = option_axes([("--max-num-seqs", ("8", "16")), ("--max-num-seqs", ("16", "32"))], version="0.33.0")
    assert axis.values == ("8", "16", "32")
    with pytest.raises(UserError, match=r"no knob '--max-num-seq' in the table \(did you mean \"--max-num-seqs\"\?\)"):
        option_axes([("--max-num-seq", ("8",))], version="0.33.0")
    with pytest.raises(UserError, match=r"vLLM 0\.19\.0 does not know it"):
        option_axes([("--numa-bind", ("on",))], version="0.19.0")
