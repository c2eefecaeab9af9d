from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration import batches
from quantmint.calibration.batches import WINDOW, batched, samples_digest, samples_of
from quantmint.calibration.errors import CalibrationError

TEXTS = [f"text {number} " * (number % 5 + 1) for number in range(40)]


def pack(texts: list[str], tokenizer: Any, samples: int = 4, length: int = 16, seed: int = 0, **more: Any) -> Any:
    how = {"samples": samples, "sequence_length": length, "packing": True, "seed": seed}
    return torch.stack(samples_of(texts, tokenizer, **how, **more))


def test_blocks_are_cut_from_one_stream_without_padding(letters: Any) -> None:
    blocks = pack(["abc", "abc"], letters, samples=2, length=5)
    assert blocks.dtype == torch.int64
    assert blocks.tolist() == [[1, *b"abc", 2], [1, *b"abc", 2]]


def test_rendered_conversations_get_no_second_start(letters: Any) -> None:
    assert pack(["abc"], letters, samples=1, length=4, special_tokens=False).tolist() == [[*b"abc", 2]]


def test_the_seed_decides_the_order(letters: Any) -> None:
    one, same, other = (pack(TEXTS, letters, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("seed", range(5))
def test_the_stream_is_whole_texts_in_some_order(letters: Any, seed: int) -> None:
    texts = ["a", "bb", "ccc", "dddd"]
    total = sum(len(text) + 2 for text in texts)
    (stream,) = pack(texts, letters, samples=1, length=total, seed=seed).tolist()
    joined = "".join(map(chr, stream))
    assert sorted(joined.replace("\x01", "").split("\x02")[:-1]) == texts


@pytest.mark.slow
def test_blocks_are_the_same_in_every_process(letters: Any) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from quantmint.calibration.batches import samples_digest, samples_of
class Letters:
    eos_token_id = 2
    def __call__(self, text, *, add_special_tokens):
        return {{"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}}
print(samples_digest(samples_of({TEXTS!r}, Letters(), samples=4, sequence_length=16, packing=True, seed=0)))
"""
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": hashed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for hashed in ("1", "2")
    }
    assert seen == {samples_digest(pack(TEXTS, letters))}


@pytest.mark.parametrize(("texts", "fit"), [([], 0), (["abc"], 1), (["abc"] * 3, 3)])
def test_too_few_texts_say_how_many_samples_there_could_be(letters: Any, texts: list[str], fit: int) -> None:
    with pytest.raises(CalibrationError, match=f"4 samples of 5 need 20: ask for at most {fit}$"):
        pack(texts, letters, samples=4, length=5)


def test_batches_keep_the_order_and_lose_nothing() -> None:
    blocks = torch.arange(21).reshape(7, 3)
    for size in (1, 2, 3, 7, 50):
        parts = list(batched(blocks, size))
        assert torch.equal(torch.cat(parts), blocks)
        assert all(part.shape[0] <= size for part in parts)


def test_a_digest_tells_where_one_sample_ends() -> None:
    one, other = ([torch.tensor(part) for part in parts] for parts in ([[1, 2], [3]], [[1], [2, 3]]))
    assert samples_digest(one) != samples_digest(other)
    assert samples_digest(torch.arange(6).reshape(2, 3)) == samples_digest([torch.arange(3), torch.arange(3, 6)])


def cut(texts: list[str], tokenizer: Any, samples: int, length: int = 16, seed: int = 0, **more: Any) -> Any:
    how = {"samples": samples, "sequence_length": length, "packing": False, "seed": seed}
    return samples_of(texts, tokenizer, **how, **more)


def test_without_packing_a_text_is_a_sample_and_keeps_its_length(letters: Any) -> None:
    texts = ["abcdefgh", "abc", "a"]
    found = cut(texts, letters, samples=3, length=5)
    assert sorted(sample.tolist() for sample in found) == [[1, *b"a"], [1, *b"abc"], [1, *b"abcd"]]
    assert all(sample.dtype == torch.int64 for sample in found)


def test_texts_without_a_token_are_passed_over(letters: Any) -> None:
    found = cut(["", "abc", ""], letters, samples=1, special_tokens=False)
    assert [sample.tolist() for sample in found] == [[*b"abc"]]
    with pytest.raises(CalibrationError, match=r"has 1 texts; 2 samples without packing .* ask for at most 1$"):
        cut(["", "abc", ""], letters, samples=2, special_tokens=False)


def test_batches_of_unequal_samples_are_of_equal_length(letters: Any) -> None:
    """Nothing is padded: what a model sees is the samples and no more."""
    found = cut(TEXTS, letters, samples=40, length=30)
    parts = list(batched(found, 4))
    assert {len(sample) for sample in found} == {part.shape[1] for part in parts}
    assert len({part.shape[1] for part in parts}) > 1, "the test cannot tell"
    assert max(part.shape[0] for part in parts) == 4
    rows = [row.tolist() for part in parts for row in part]
    assert sorted(rows) == sorted(sample.tolist() for sample in found)


def test_the_order_is_seeded_within_windows_and_reads_no_window_too_many(letters: Any) -> None:
    taken: list[str] = []

    def texts() -> Iterator[str]:
        for number in range(10 * WINDOW):
            taken.append(f"{number:05}")
            yield taken[-1]

    few = cut(texts(), letters, samples=10)  # type: ignore[arg-type]
    assert len(taken) == WINDOW
    taken.clear()
    many = cut(texts(), letters, samples=WINDOW + 10)  # type: ignore[arg-type]
    assert len(taken) == 2 * WINDOW
    assert all(torch.equal(one, other) for one, other in zip(few, many[:10], strict=True))
    first = sorted("".join(map(chr, sample.tolist()[1:])) for sample in many[:WINDOW])
    assert first == taken[:WINDOW]
    assert [*map(len, few)] == [6] * 10
    assert not torch.equal(torch.cat(few), torch.cat(cut(texts(), letters, samples=10, seed=1)))  # type: ignore[arg-type]


def test_the_order_of_texts_is_numpys() -> None:
    """Sets that were drawn before keep their order; where NumPy draws another one day, this test is to go."""
    import numpy

    for seed in (0, 1, 42):
        generator, numbers = numpy.random.default_rng(seed), batches._random_numbers(seed)
        for count in (1, 2, 3, 1000, 1024, 5):
            assert batches._permutation(count, numbers) == generator.permutation(count).tolist()
    assert batches._permutation(10, batches._random_numbers(0)) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
