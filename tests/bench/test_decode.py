"""The benchmark of quantized sources runs from end to end; what it measures is nobody's promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.decode import CASES, main


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--contenders", "cp,quantmint", "--folder", str(tmp_path)]
    main([*options, "--json", str(tmp_path / "decode.json")], standalone_mode=False)
    runs = json.loads((tmp_path / "decode.json").read_text())["runs"]
    assert [(run["case"], run["contender"]) for run in runs] == [
        (case, name) for case in CASES for name in ("cp", "quantmint")
    ]
    assert all(run["wall"] > 0 and run["made_gb"] > 0 for run in runs)
    assert not list(tmp_path.glob("quantmint-decode-*")), "the models are removed"
