"""What the recipe wishes, on the modules that the model has."""

from __future__ import annotations

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.quantization import Override, Quantization

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
LINEAR = tuple(f"model.layers.{layer}.{part}" for layer in range(3) for part in PARTS)
STRUCTURE = Structure(
    linear=dict.fromkeys(LINEAR, (32, 32)),
    kept={"lm_head": "output head", "model.layers.0.mlp.gate": "router"},
    attention=("model.layers.0.self_attn",),
    parameters=1,
)


def wish(**options: object) -> Quantization:
    return Quantization.model_validate({"scheme": "ptpc_fp8", **options})


def override(scheme: str, *modules: str) -> Override:
    return Override(scheme=scheme, modules=modules)


def test_everything_linear_gets_the_scheme() -> None:
    choice = select(STRUCTURE, wish(kv_cache="fp8"))
    assert choice.schemes == dict.fromkeys(LINEAR, "ptpc_fp8")
    assert choice.kept == ("lm_head", "model.layers.0.mlp.gate")
    assert choice.kv_cache
    assert not select(STRUCTURE, wish()).kv_cache


def test_an_exact_name_is_one_module() -> None:
    choice = select(STRUCTURE, wish(exclude=["model.layers.1.mlp.down_proj"]))
    assert set(LINEAR) - choice.schemes.keys() == {"model.layers.1.mlp.down_proj"}
    assert "model.layers.1.mlp.down_proj" in choice.kept


def test_an_expression_matches_from_the_start() -> None:
    choice = select(STRUCTURE, wish(exclude=["re:model.layers.2."]))
    assert {name for name in LINEAR if name not in choice.schemes} == {n for n in LINEAR if ".2." in n}
    with pytest.raises(UserError, match="matches none"):
        select(STRUCTURE, wish(exclude=["re:layers.2."]))


def test_every_module_is_in_one_place_and_sorted() -> None:
    choice = select(STRUCTURE, wish(exclude=[r"re:.*\.o_proj"], overrides=[override("fp8", r"re:.*\.mlp\..*")]))
    assert sorted([*choice.schemes, *choice.kept]) == sorted([*LINEAR, *STRUCTURE.kept])
    assert list(choice.kept) == sorted(choice.kept)


def test_exclusion_goes_before_any_override() -> None:
    choice = select(
        STRUCTURE, wish(exclude=["model.layers.0.mlp.up_proj"], overrides=[override("fp8", r"re:.*\.mlp\..*")])
    )
    assert "model.layers.0.mlp.up_proj" in choice.kept
    assert choice.schemes["model.layers.1.mlp.up_proj"] == "fp8"
    assert choice.schemes["model.layers.1.self_attn.q_proj"] == "ptpc_fp8"


@pytest.mark.parametrize("field", ["exclude", "overrides"])
@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("model.layers.1.mlp.down_prj", "model.layers.1.mlp.down_proj"),
        ("model.layer.2.self_attn.o_proj", "model.layers.2.self_attn.o_proj"),
    ],
)
def test_a_typo_is_refused_with_the_nearest_name(field: str, typo: str, near: str) -> None:
    options = {"exclude": [typo]} if field == "exclude" else {"overrides": [override("fp8", typo)]}
    candidates = 20 if field == "exclude" else 18  # what is kept anyway gets no scheme
    with pytest.raises(UserError) as refused:
        select(STRUCTURE, wish(**options))
    assert refused.value.message == (
        f"quantization.{field}: found '{typo}', which matches none of the model's {candidates} modules "
        f'(did you mean "{near}"?).'
    )
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("pattern", ["lm_head", "re:lm_.*"])
def test_a_scheme_for_what_is_kept_is_refused_and_not_called_a_typo(pattern: str) -> None:
    with pytest.raises(UserError, match=r"overrides: found '.*', which means lm_head and nothing that is quantized"):
        select(STRUCTURE, wish(overrides=[{"scheme": "fp8_block", "modules": [pattern]}]))


def test_a_pattern_may_sweep_over_what_is_kept() -> None:
    choice = select(STRUCTURE, wish(overrides=[{"scheme": "mxfp4", "modules": ["re:.*"]}]))
    assert choice.schemes == dict.fromkeys(LINEAR, "mxfp4")
    assert choice.kept == tuple(STRUCTURE.kept)


def test_excluding_everything_is_refused() -> None:
    with pytest.raises(UserError, match=f"every one of the model's {len(LINEAR)} linear modules"):
        select(STRUCTURE, wish(exclude=["re:.*"]))
