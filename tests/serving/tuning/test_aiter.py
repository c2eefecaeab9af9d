"""AITER's tuner: which products it is asked for, what is kept, and that the sweep tries it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, facts_of_config
from quantmint.pipeline.serving.tuning.aiter import Gemms, gemms, shapes
from tests.serving.tuning.sweeping import command_in, run, starts, subject_in, sweep_of

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
VARIABLE = "AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE"
ASKED = Gemms(VARIABLE, "a8w8_bpreshuffle", ("M,N,K,q_dtype_w", "1,1280,8192,torch.float8_e4m3fn"))
TUNED = "gfx,cu_num,M,N,K,q_dtype_w,us\ngfx950,256,1,1280,8192,torch.float8_e4m3fn,4.2\n"


@pytest.fixture
def llama() -> ModelFacts:
    return facts_of_config(LLAMA_70B)


def test_products_are_those_of_a_rank_as_vllm_fuses_them(llama: ModelFacts) -> None:
    # qkv, o, gate and up, down: rows of the fused weight of a rank and its columns.
    assert shapes(llama, 1) == [(8192, 8192), (8192, 28672), (10240, 8192), (57344, 8192)]
    assert shapes(llama, 8) == [(1280, 8192), (7168, 8192), (8192, 1024), (8192, 3584)]
    # Beyond its 8 heads of K and V, ranks hold copies of them.
    assert (512 + 2 * 128, 8192) in shapes(llama, 16)


def test_the_tuner_is_asked_by_tokens_and_type(tmp_path: Path, llama: ModelFacts) -> None:
    plan = subject_in(tmp_path, tensor=8, base={"--max-num-batched-tokens": "4096"}).plan(())
    asked = gemms(as_quantized(llama, scheme="ptpc_fp8"), "gfx942", plan)
    assert (asked.variable, asked.table) == (VARIABLE, "a8w8_bpreshuffle")
    assert asked.lines[:3] == (
        "M,N,K,q_dtype_w",
        "1,1280,8192,torch.float8_e4m3fnuz",
        "2,1280,8192,torch.float8_e4m3fnuz",
    )
    assert len(asked.lines) == 1 + 4 * 13
    assert asked.lines[-1].startswith("4096,8192,3584,")
    assert gemms(as_quantized(llama, scheme="mxfp4"), "gfx950", plan).lines[:2] == ("M,N,K", "1,1280,8192")
    with pytest.raises(UserError, match="tunes no products of none, expected one of ptpc_fp8"):
        gemms(llama, "gfx942", plan)


def with_aiter(folder: Path, ending: str) -> None:
    """A serving environment whose AITER has a tuner that copies a table and ends with `ending`."""
    tuners = folder / "meta" / "csrc" / "ck_gemm_a8w8_bpreshuffle"
    tuners.mkdir(parents=True)
    (folder / "site" / "aiter" / "jit").mkdir(parents=True)
    (folder / "site" / "aiter" / "jit" / "core.py").write_text(f"AITER_META_DIR = {str(folder / 'meta')!r}\n")
    program = f"""import sys, pathlib
assert sys.argv[1] == '-i' and sys.argv[3] == '-o'
assert pathlib.Path(sys.argv[2]).read_text().splitlines() == {list(ASKED.lines)!r}
open({str(folder / "tuned")!r}, 'a').write('once ')
{ending}
"""
    (tuners / "gemm_a8w8_bpreshuffle_tune.py").write_text(program)
    python = command_in(folder).with_name("python")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)


@pytest.mark.slow
def test_what_it_found_is_tried_and_made_once(surface: Callable[..., Path]) -> None:
    name = f"a8w8_bpreshuffle_tuned_gemm.{sha256(TUNED.encode()).hexdigest()[:12]}.csv"
    folder = surface()
    table = folder / "out" / "aiter" / name
    surface(throughput={VARIABLE: {str(table): 1.3}})
    with_aiter(folder, f"pathlib.Path(sys.argv[4]).write_text({TUNED!r})")
    for _ in range(2):
        found = run(folder, sweep_of(folder, {}, kind="rocm"), products=ASKED)
        assert found["serve"] == {"knobs": {VARIABLE: str(table)}}
        assert table.read_text() == TUNED
        assert [start.get(VARIABLE) for start in starts(folder)] == [
            None,
            str(table),
            None,
            *[None, str(table), str(table), None, str(table), None],
        ]
        assert (folder / "tuned").read_text() == "once "
    assert "AITER's tuned kernels" in [point["label"] for point in found["points"]]


@pytest.mark.parametrize(
    ("ending", "message"), [("sys.exit(3)", "AITER's tuner ended with exit code 3"), ("", "found no kernel")]
)
def test_a_tuner_that_fails_leaves_nothing(surface: Callable[..., Path], ending: str, message: str) -> None:
    folder = surface()
    with_aiter(folder, ending)
    with pytest.raises(StageError, match=message):
        run(folder, sweep_of(folder, {}, kind="rocm"), products=ASKED)
    assert starts(folder) == []
    assert not (folder / "out" / "aiter").exists()


def test_without_aiter_it_says_so(surface: Callable[..., Path]) -> None:
    folder = surface()
    with_aiter(folder, "")
    (folder / "site" / "aiter" / "jit" / "core.py").unlink()
    with pytest.raises(StageError, match="cannot find AITER's tuners"):
        run(folder, sweep_of(folder, {}, kind="rocm"), products=ASKED)
