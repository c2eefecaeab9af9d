"""What is counted equals what the published sizes of the models say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantmint.pipeline.stages.cost import CARRIED, CalibrateVolume, QuantizeVolume, routed_share

Quantized = Callable[[str, str], QuantizeVolume]
Calibrated = Callable[..., CalibrateVolume]

LINEAR_8B = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)


def test_every_weight_meets_one_kernel(quantized: Quantized) -> None:
    volume = quantized("8b", "ptpc_fp8")
    assert volume.kernels["ptpc_fp8"] == 2 * LINEAR_8B
    assert sum(volume.kernels.values()) == volume.read == volume.distinct
    assert volume.kernels[CARRIED] == volume.read - 2 * LINEAR_8B


def test_a_scale_of_a_whole_weight_takes_a_second_reading(quantized: Quantized) -> None:
    volume = quantized("8b", "fp8")
    assert volume.read == volume.distinct + 2 * LINEAR_8B


def test_mxfp4_writes_four_and_a_quarter_bits(quantized: Quantized) -> None:
    sizes = {scheme: quantized("8b", scheme).written for scheme in ("ptpc_fp8", "mxfp4")}
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    # Headers name two tensors a module in both; they differ in the digits of offsets only.
    assert sizes["ptpc_fp8"] - sizes["mxfp4"] == pytest.approx(LINEAR_8B * (8 - 4.25) / 8 + 2 * rows, abs=20_000)


def test_an_imagined_model_comes_in_files_as_the_hub_cuts_them(quantized: Quantized) -> None:
    volume = quantized("70b", "ptpc_fp8")
    assert volume.files == -(-volume.written // volume.largest)
    assert volume.largest == 5_000_000_000


def test_a_forward_takes_two_operations_a_weight_and_token(calibrated: Calibrated) -> None:
    volume = calibrated("8b", samples=4, sequence_length=16)
    scores = 4 * 16 * 16 * 32 * 32  # tokens, length, heads, layers
    assert volume.scores == scores
    assert volume.flops == 2 * 64 * LINEAR_8B + 4 * scores * 128
    assert volume.need.states == 64 * 4096 * 2


def test_the_largest_layer_and_what_is_never_loaded(calibrated: Calibrated) -> None:
    need = calibrated("8b").need
    assert need.layer == 2 * (LINEAR_8B // 32 + 2 * 4096)
    assert need.weights == 2 * (LINEAR_8B + 128_256 * 4096 + 65 * 4096), "the output head is left out"


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({}, 1.0),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, 1 / 32),
        ({"num_experts": 128, "num_experts_per_tok": 8}, 1 / 16),
        ({"num_experts": 0, "num_experts_per_tok": 8}, 1.0),
    ],
)
def test_how_many_experts_a_token_meets(config: dict[str, int], share: float) -> None:
    assert routed_share(config) == share


def test_every_expert_is_given_every_token_besides_its_own(calibrated: Calibrated) -> None:
    volume = calibrated("mixtral", samples=1, sequence_length=8)
    attention = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096)
    experts = 32 * 8 * 3 * 14336 * 4096
    assert volume.flops == 2 * 8 * (attention + 1.25 * experts) + 4 * volume.scores * 128
    routed = calibrated("mixtral", samples=1, sequence_length=8, experts="routed")
    assert routed.flops == 2 * 8 * (attention + 0.25 * experts) + 4 * volume.scores * 128
