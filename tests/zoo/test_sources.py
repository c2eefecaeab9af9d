"""Sources as releases have them, through `quantmint quantize` and `quantmint inspect --source` as commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zoo.matrix import outcome, outcome_of
from tests.zoo.models import VARIANTS, add_predictor, build, encode_blocks, variant

Source = Callable[[str], Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Models by name, each built once; "+mtp" adds a predictor, "+fp8" stores the linear weights in FP8 blocks."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("source") / "model"
            base, _, last = name.rpartition("+")
            if last == "fp8":
                encode_blocks(get(base), folder)
            elif last == "mtp":
                build(base, folder)
                add_predictor(folder, "deepseek" if base.startswith("deepseek") else "qwen")
            else:
                build(name, folder)
            folders[name] = folder
        return folders[name]

    return get


@pytest.mark.parametrize("column", ["ptpc_fp8", "fp8_block", "mxfp4_quark"])
@pytest.mark.parametrize("name", ["llama+fp8", "qwen3_moe+fp8", "deepseek_v3+mtp+fp8"])
def test_a_source_in_fp8_blocks_is_sound(source: Source, tmp_path: Path, name: str, column: str) -> None:
    result = outcome_of(name.partition("+")[0], column, source(name), tmp_path / "out")
    assert str(result) == "sound"
    assert result.share > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama+fp8", "deepseek_v3+mtp+fp8"])
def test_a_source_in_fp8_blocks_goes_through_gptq(source: Source, tmp_path: Path, name: str) -> None:
    assert str(outcome_of(name.partition("+")[0], "mxfp4_gptq", source(name), tmp_path / "out")) == "sound"


@pytest.mark.parametrize("column", ["ptpc_fp8", "mxfp4_quark"])
@pytest.mark.parametrize("name", ["deepseek_v3+mtp", "qwen3_5+mtp", "qwen3_5_moe+mtp", "qwen3_next+mtp"])
def test_a_predictor_stays_in_16_bit_and_is_named(source: Source, tmp_path: Path, name: str, column: str) -> None:
    out = tmp_path / "out"
    assert str(outcome_of(name.partition("+")[0], column, source(name), out, keep=True)) == "sound"
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    ignored = declared["ignore" if column == "ptpc_fp8" else "exclude"]
    assert r"re:(.*\.)?" + (r"layers\.2\..*" if "deepseek" in name else r"mtp\..*") in ignored
    if name == "qwen3_5_moe+mtp":
        assert "mtp.layers.0.mlp.experts" in ignored  # a stack: it has no weights of single experts


@pytest.mark.parametrize(
    ("name", "module"), [("jamba", "mamba.in_proj"), ("deepseek_v32", "indexer.wk"), ("qwen3_5_moe+mtp", "mtp.fc")]
)
def test_a_module_that_is_taken_out_of_the_ignored_ones_is_found(
    source: Source, tmp_path: Path, name: str, module: str
) -> None:
    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
    from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
    from quantmint.pipeline.quantize.model.reader import read_structure

    out = tmp_path / "out"
    assert str(outcome_of(name.partition("+")[0], "ptpc_fp8", source(name), out, keep=True)) == "sound"
    config = json.loads((out / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    kept = [each for each in ignored if not each.startswith("re:") and not each.endswith(module)]
    assert len(kept) < len(ignored)
    config["quantization_config"]["ignore"] = kept
    (out / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(out)
    inspection = inspect_checkpoint(checkpoint, read_structure(out, checkpoint.tensors))
    assert any(finding.rule == "not quantized" and module in finding.where for finding in inspection.findings)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("column", ["ptpc_fp8", "mxfp4_quark", "fp8_cache"])
def test_sources_in_other_floats_are_sound(tmp_path: Path, dtype: str, column: str) -> None:
    folder = build("llama", tmp_path / "model", dtype=dtype)
    assert str(outcome_of("llama", column, folder, tmp_path / "out")) == "sound"


@pytest.mark.parametrize("change", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_releases_have_beside_their_weights(source: Source, tmp_path: Path, name: str, change: str) -> None:
    """A head that is tied, several files, a stale single file beside an index, and tensors that are no parameters."""
    folder = variant(change, source(name), tmp_path / "model")
    said = str(outcome_of(name, "fp8_cache", folder, tmp_path / "out"))
    if change == "unknown":
        assert "unknown_proj.weight: it is stored, and no module of config.json has it" in said
    else:
        assert said == "sound"


def test_a_merged_adapter_is_not_applied_again(source: Source, tmp_path: Path) -> None:
    folder = variant("shards", source("llama"), tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    assert str(outcome_of("llama", "ptpc_fp8", folder, tmp_path / "out", keep=True)) == "sound"
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper than any configuration"),
        (None, "cannot build this model"),
    ],
    ids=["nested", "width"],
)
def test_a_configuration_that_is_none_is_refused(source: Source, tmp_path: Path, change: str | None, said: str) -> None:
    folder = variant("shards", source("llama"), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(change or json.dumps(json.loads(path.read_text()) | {"intermediate_size": "wide"}))
    result = outcome_of("llama", "mxfp4", folder, tmp_path / "out")
    assert result.kind == "refused"
    assert said in result.message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dbrx", "transformer.blocks.0.ffn.experts.mlp.v1 is a weight that quantmint cannot quantize"),
        ("aria", "experts.fc1.weight is a weight that quantmint cannot quantize"),
        ("jetmoe", "6% of the decoder's weights can be quantized"),
        ("gpt2", "attn.c_attn.weight is a weight that quantmint cannot quantize: Conv1D"),
        ("mamba", "without a linear module that vLLM loads quantized"),
    ],
)
def test_a_model_that_would_stay_in_16_bit_is_refused(tmp_path: Path, name: str, said: str) -> None:
    result = outcome(name, "ptpc_fp8", tmp_path)
    assert result.kind == "refused"
    assert said in result.message
