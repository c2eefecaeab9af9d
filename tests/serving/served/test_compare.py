"""The comparison sees what it is there to see: transformers in bfloat16 stands in for a server that reads wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantmint.pipeline.base.hardware import local_cpu_flags
from tests.serving.served.answers import PROMPT_TOKENS, Answers, prompts
from tests.serving.served.cases import SOME_LAYERS, Case, loaded, make_case, with_fp8_cache
from tests.serving.served.compare import judge, remembered
from tests.serving.served.readings import AS_MEANT, Reading, faults, plausible, wrong_caches
from tests.serving.served.reference import Reference

CASES = [
    Case("ptpc_fp8", "compressed-tensors", "fp8"),
    Case("mxfp4", "quark"),
    Case("mxfp4", "compressed-tensors", other="fp8"),
    Case("mxfp4", "quark", other="ptpc_fp8", where=SOME_LAYERS),
]


def spoken(reference: Reference, reading: Reading) -> Answers:
    """What a server that reads so would say of the prompts' own tokens; it adds none."""
    ids = torch.tensor(prompts())
    places = [(number, place) for number in range(len(ids)) for place in range(PROMPT_TOKENS - 1)]
    rows = torch.tensor([(number, place, int(ids[number, place + 1])) for number, place in places])
    empty = Answers(ids, rows, torch.zeros(len(rows)), prompt_tokens=PROMPT_TOKENS)
    return replace(empty, logprobs=reference.logprobs(empty, reading, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_reading_is_accepted_and_every_wrong_one_is_not(case: Case, tmp_path: Path) -> None:
    reference = Reference(make_case(case, tmp_path / "checkpoint", device="cpu"))
    right = spoken(reference, AS_MEANT)
    said = remembered(reference, right)  # the same places of the same prompts are asked whatever is answered
    assert judge(case, right, said).objections == ()
    wrong = [*faults(case, AS_MEANT), *(wrong_caches(AS_MEANT) if case.kv_cache == "fp8" else ())]
    assert len(wrong) >= 4
    for reading in wrong:
        objections = judge(case, spoken(reference, reading), said).objections
        assert any(reading.name in objection for objection in objections), (reading.name, objections)


def test_the_cases_of_a_cpu_are_what_its_table_leaves() -> None:
    flags = frozenset({"avx512f"})
    pairs = {(case.scheme, case.checkpoint_format) for case in loaded("cpu", cpu_flags=flags)}
    assert {("ptpc_fp8", "quark"), ("ptpc_fp8", "compressed-tensors")} <= pairs
    assert not {"fp8", "fp8_block", "mxfp4", "mxfp8"} & {scheme for scheme, _ in pairs}
    assert "fp8_block" in {case.scheme for case in loaded("cpu", cpu_flags={"amx_tile"})}
    assert with_fp8_cache("cpu", ["ptpc_fp8"], cpu_flags={"avx2"}) == ()
    assert len(with_fp8_cache("cpu", ["ptpc_fp8"], cpu_flags=flags)) == 2
    assert local_cpu_flags() is None or loaded("cpu", cpu_flags=local_cpu_flags())


def test_plausible_readings_have_the_right_weights() -> None:
    assert all(reading.change is AS_MEANT.change and reading.quantized for case in CASES for reading in plausible(case))
    assert len({reading.name for reading in plausible(CASES[0])}) == 4
