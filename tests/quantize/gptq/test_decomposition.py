"""The decomposition in blocks, beside PyTorch's own in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantmint.pipeline.quantize.gptq import decomposition
from quantmint.pipeline.quantize.gptq.decomposition import decompose, is_finite, solve_decomposed


def positive(columns: int) -> Any:
    inputs = torch.randn(3 * columns, columns, generator=torch.Generator().manual_seed(columns))
    return inputs.t() @ inputs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decomposition, "_BLOCK", 32)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 160])
def test_a_matrix_is_decomposed_in_its_own_memory(columns: int) -> None:
    matrix = positive(columns)
    exact = torch.linalg.cholesky(matrix.double().flip(0, 1)).flip(0, 1).t()
    given, address = matrix.clone().tril_(), matrix.data_ptr()
    assert decompose(given)
    torch.testing.assert_close(given.double(), exact, rtol=1e-4, atol=1e-3)
    assert not given.triu(1).any()
    assert decompose(matrix) and matrix.data_ptr() == address  # noqa: PT018 - one fact
    assert torch.equal(matrix, given), "what lies above the diagonal was read"


def test_linear_equations_are_solved() -> None:
    matrix, wanted = positive(100), torch.randn(100, 7, generator=torch.Generator().manual_seed(0))
    right = matrix @ wanted
    assert decompose(matrix)
    torch.testing.assert_close(solve_decomposed(matrix, right), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("place", [5, 90])
def test_what_is_not_positive_definite_is_refused(place: int) -> None:
    matrix = positive(100)
    matrix[place, place] = -1
    assert not decompose(matrix)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_found(number: float) -> None:
    assert is_finite(torch.ones(4, 4))
    assert not is_finite(torch.ones(4, 4).index_fill_(1, torch.tensor([2]), number))
