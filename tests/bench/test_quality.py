"""A checkpoint that loses nothing is measured as one, and one that loses much as such; ours, from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.quality import ROOT, goals, main


@pytest.mark.slow
def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told, source = tmp_path / "quality.json", ROOT / "recipes" / "tiny" / "model"
    options = [
        "--model",
        "tiny",
        "--windows",
        "4",
        "--only",
        "mxfp4,mxfp4 with scales rounded up",
        "--row",
        "half=--scheme ptpc_fp8",
    ]
    places = ["--made", f"itself={source}", "--folder", str(tmp_path), "--json", str(told)]
    with pytest.raises(SystemExit) as ended:
        main([*options, *places, "--plot", str(tmp_path / "quality.svg")])
    assert ended.value.code == 0
    result = json.loads(told.read_text())
    mxfp4, rounded_up, half, itself = result["rows"]
    assert (mxfp4["name"], half["name"], itself["name"]) == ("mxfp4", "half", "itself")
    assert rounded_up["bits"] == mxfp4["bits"]
    assert 0 < rounded_up["kl"] != mxfp4["kl"]
    assert mxfp4["other_kl"] == pytest.approx(rounded_up["kl"]), "the same checkpoint, its inputs rounded otherwise"
    assert "other_kl" not in half
    assert (itself["kl"], itself["top1"], itself["bits"]) == (pytest.approx(0, abs=1e-6), 1.0, 16.0)
    assert itself["perplexity"] == pytest.approx(itself["base_perplexity"])
    assert 0 < 10 * half["kl"] < mxfp4["kl"]
    assert mxfp4["bits"] == pytest.approx(4.25)
    assert mxfp4["rss"] > 50e6
    assert goals([mxfp4 | {"at_most": 1.0}, half | {"at_most": "itself"}, itself]) == [
        f"mxfp4: goal 1 nats: {mxfp4['kl']:.3f}, reached",
        f"half: goal that of itself, 0.000 nats: {half['kl']:.3f}, missed",
    ]
    assert "<svg" in (tmp_path / "quality.svg").read_text()
    assert not list(tmp_path.glob("quantmint-quality-*")), "what was made is removed"
