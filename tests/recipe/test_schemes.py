"""The table of schemes: sizes on disk against the layouts that the libraries write."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.base.schemes import WRITES, scheme, table
from quantmint.pipeline.quantize.formats.layout import stores, weight_tensors
from quantmint.pipeline.recipe.load import load_recipe, recipe_of

OUT, IN = 4096, 14336


@pytest.mark.parametrize(
    ("name", "weight", "compressed_tensors", "quark"),
    [
        ("ptpc_fp8", OUT * IN, OUT * 2, OUT * 2),
        ("fp8", OUT * IN, 2 + 2, 2 + 2),
        ("fp8_block", OUT * IN, (OUT // 128) * (IN // 128) * 2, (OUT // 128) * (IN // 128) * 2),
        ("mxfp4", OUT * IN // 2, OUT * IN // 32, OUT * IN // 32),
        ("mxfp4_weight_only", OUT * IN // 2, OUT * IN // 32, OUT * IN // 32),
        ("mxfp4_fp8", OUT * IN // 2, None, OUT * IN // 32 + 2),
        ("mxfp6_e2m3", OUT * IN * 3 // 4, None, OUT * IN // 32),
        ("mxfp6_e3m2", OUT * IN * 3 // 4, None, OUT * IN // 32),
        ("mxfp8", OUT * IN, OUT * IN // 32, None),
        ("int8_w8a8", OUT * IN, OUT * 2, OUT * 2 + OUT),
        ("w4a16", OUT * IN // 2, OUT * IN // 128 * 2 + 16, OUT * IN // 128 * 2 + OUT * IN // 256),
    ],
)
def test_each_format_holds_a_scheme_in_so_many_bytes(
    name: str, weight: int, compressed_tensors: int | None, quark: int | None
) -> None:
    for layout, scales in (("compressed-tensors", compressed_tensors), ("quark", quark)):
        assert (layout in scheme(name).formats) == stores(layout, name) == (scales is not None)
        if scales is not None:
            tensors = weight_tensors(layout, name, "m", (OUT, IN), "BF16")
            assert sum(tensor.nbytes for tensor in tensors) == weight + scales


def test_every_layout_is_there_or_refused_with_a_reason() -> None:
    for row in table().values():
        assert {*row.formats, *dict(row.refused)} == {"compressed-tensors", "quark"}
        assert not {*row.formats} & {*dict(row.refused)}
        assert all(row.makers(layout) for layout in row.formats), row.name
        assert set(row.engines) <= set(WRITES)


@pytest.mark.parametrize(("hardware", "mx_scales"), [("mi355x", "up"), ("mi355x", "even"), ("mi300x", "even")])
def test_a_target_rounds_mx_scales_as_its_kernels_can(hardware: str, mx_scales: str) -> None:
    target = {"hardware": hardware, "mx_scales": mx_scales}
    sections = {"source": {"folder": "."}, "quantization": {"scheme": "mxfp4"}, "target": target}
    assert recipe_of(sections).recipe.mx_settings == {"mx_scales": mx_scales}
    plain = recipe_of({**sections, "target": {"hardware": hardware}}).recipe
    assert plain.mx_settings == {}
    assert "mx_scales" not in plain.target.model_dump()
    dense = recipe_of({**sections, "quantization": {"scheme": "ptpc_fp8"}}).recipe
    assert dense.mx_settings == {}


@pytest.mark.parametrize(
    ("target", "rounding"),
    [
        ({"aiter": "0.1.15.post3"}, "even"),
        ({"aiter": "0.1.16"}, "up"),
        ({"aiter": "v0.1.20.post1"}, "up"),
        ({"aiter": "0.1.16.dev7+g1a2b3c"}, None),
        ({"aiter": "0.1.17", "mx_scales": "even"}, "even"),  # its Triton kernels
        ({"aiter": "0.1.16.dev7+g1a2b3c", "mx_scales": "up"}, "up"),
    ],
)
def test_the_version_of_aiter_tells_how_the_target_rounds(target: dict[str, str], rounding: str | None) -> None:
    sections = {"source": {"folder": "."}, "quantization": {"scheme": "mxfp4"}}
    recipe = recipe_of({**sections, "target": {"hardware": "mi355x", **target}}).recipe
    assert recipe.target.rounding == rounding
    assert recipe.mx_settings == ({} if rounding is None else {"mx_scales": rounding})
    assert "aiter" not in recipe_of({**sections, "target": {"hardware": "mi355x"}}).recipe.target.model_dump()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("hardware: mi355x, mx_scales: up, aiter: 0.1.15", "expected 0.1.16 or newer with `mx_scales: up`"),
        ("hardware: mi300x, aiter: 0.1.16", "expected none: mi300x has no kernels of AITER that round MX scales"),
    ],
)
def test_a_version_of_aiter_that_contradicts_the_target_is_refused(tmp_path: Path, target: str, words: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"name: r\nsource: {{folder: .}}\nquantization: {{scheme: mxfp4}}\ntarget: {{{target}}}\n")
    with pytest.raises(RecipeError, match=f"target.aiter: found .*{words}"):
        load_recipe(str(recipe))


def test_a_rounding_that_no_kernel_of_the_target_has_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: r\nsource: {folder: .}\nquantization: {scheme: mxfp4}\ntarget: {hardware: mi300x, mx_scales: up}\n"
    )
    with pytest.raises(RecipeError, match=r'4:.*target.mx_scales: found "up", expected even, by the kernels of mi300x'):
        load_recipe(str(recipe))
