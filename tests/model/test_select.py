from __future__ import annotations

import pytest

from pipeline.errors import UserError
from pipeline.model.select import select
from pipeline.model.structure import Structure
from pipeline.recipe.schema import Quantization

LINEAR = tuple(f"model.layers.{layer}.self_attn.{part}" for layer in range(2) for part in ("k_proj", "o_proj"))
STRUCTURE = Structure(dict.fromkeys(LINEAR, (64, 64)), ("lm_head",), (), 0)


def wish(**changes: object) -> Quantization:
    fields = {"scheme": "ptpc_fp8", "kv_cache": "auto", "format": "quark", **changes}
    return Quantization.model_validate(fields)


def test_every_linear_module_gets_the_scheme_and_the_head_stays() -> None:
    choice = select(STRUCTURE, wish())
    assert choice.schemes == dict.fromkeys(LINEAR, "ptpc_fp8")
    assert choice.kept == ("lm_head",)
    assert not choice.kv_cache
    assert select(STRUCTURE, wish(kv_cache="fp8")).kv_cache


def test_what_is_excluded_is_kept_by_name_and_by_pattern() -> None:
    choice = select(STRUCTURE, wish(exclude=[LINEAR[0], r"re:.*layers\.1\.self_attn\.o_proj"]))
    assert set(choice.schemes) == {LINEAR[1], LINEAR[2]}
    assert choice.kept == ("lm_head", LINEAR[0], LINEAR[3])


def test_the_head_may_be_excluded_by_name() -> None:
    assert select(STRUCTURE, wish(exclude=["lm_head"])).kept == ("lm_head",)


def test_a_name_that_matches_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"exclude: found 'model.layers.0.self_attn.k_prj'.*k_proj"):
        select(STRUCTURE, wish(exclude=["model.layers.0.self_attn.k_prj"]))


def test_excluding_everything_is_refused() -> None:
    with pytest.raises(UserError, match="every one of the model's 4 linear modules"):
        select(STRUCTURE, wish(exclude=["re:.*"]))


@pytest.mark.parametrize("pattern", ["lm_head", "re:lm_.*"])
def test_a_scheme_for_what_is_kept_is_refused_and_not_called_a_typo(pattern: str) -> None:
    with pytest.raises(UserError, match=r"overrides: found '.*', which means lm_head and nothing that is quantized"):
        select(STRUCTURE, wish(overrides=[{"scheme": "fp8_block", "modules": [pattern]}]))


def test_a_pattern_may_sweep_over_what_is_kept() -> None:
    choice = select(STRUCTURE, wish(overrides=[{"scheme": "mxfp4", "modules": ["re:.*"]}]))
    assert choice.schemes == dict.fromkeys(LINEAR, "mxfp4")
    assert choice.kept == ("lm_head",)
