"""The definitions of calibration sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantmint.calibration import batches as hub_module
from quantmint.calibration.batches import at_commit
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.sets import FOLDER, load_set, names
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.recipe.calibration import Calibration
from quantmint.pipeline.stages import calibrate
from quantmint.pipeline.stages.setting import Commits


def test_shipped_sets() -> None:
    assert names() == ("cnn_dailymail", "open-platypus", "pile_val", "tiny", "ultrachat")
    assert all(load_set(name).name == name for name in names())
    tiny = load_set("tiny")
    assert tiny.file == (FOLDER.parent / "data" / "tiny.jsonl").resolve()
    assert (tiny.repo, tiny.revision, tiny.split, tiny.text) == (None, None, None, "text")
    chats = load_set("ultrachat")
    assert (chats.repo, chats.split, chats.messages) == ("HuggingFaceH4/ultrachat_200k", "train_sft", "messages")
    assert load_set("open-platypus").turns == (("user", "instruction"), ("assistant", "output"))
    news, pile = load_set("cnn_dailymail"), load_set("pile_val")
    assert (news.repo, news.config, news.text) == ("abisee/cnn_dailymail", "3.0.0", "article")
    assert (pile.repo, pile.split, pile.text) == ("mit-han-lab/pile-val-backup", "validation", "text")
    assert len({hash(load_set(name)) for name in names()}) == 5


def test_a_set_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndescription: Ours.\nrepo: org/data\ntext: body\n")
    mine = load_set(str(path))
    assert (mine.repo, mine.revision, mine.split, mine.config) == ("org/data", "main", "train", None)


def test_unknown_set() -> None:
    with pytest.raises(CalibrationError) as refused:
        load_set("ultrachatt")
    assert str(refused.value) == (
        'found no calibration set "ultrachatt", expected one of cnn_dailymail, open-platypus, pile_val, tiny, '
        "ultrachat "
        '(did you mean "ultrachat"?)'
    )


HEAD = "name: m\ndescription: d\n"
A = "file: a.jsonl\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + "fil: a\ntext: t\n", r'm\.yaml:3: fil: found an unknown key, expected .* \(did you mean "file"\?\)'),
        (HEAD + A, "found none of them, expected exactly one of text, messages, turns"),
        (HEAD + A + "repo: b\ntext: t\n", r"m\.yaml:4: repo: found file with repo, expected exactly one of"),
        (HEAD + A + "text: t\nsplit: s\n", r"m\.yaml:5: split: found it beside a file, expected it with a repo"),
        (HEAD + "file: a.csv\ntext: t\n", r'm\.yaml:3: file: found "a.csv", expected a file in .jsonl, .parquet, .txt'),
        (HEAD + A + "turns:\n  userr: x\n", r'm\.yaml:5: turns.userr: found an unknown .* \(did you mean "user"\?\)'),
        (HEAD + A + "text: t\nsamples: 0\n", r"m\.yaml:5: samples: found 0, expected a whole number of at least 1"),
        (HEAD + A + "text: t\nsample_by: line\n", r"m\.yaml:5: sample_by: found it beside a.jsonl, expected .* \.txt"),
        ("name: n\ndescription: d\n" + A + "text: t\n", r'm\.yaml:1: name: found "n", expected the name of its file'),
        ("a: [\n", r"m\.yaml:2: not a YAML file"),
    ],
)
def test_faults(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=expected):
        load_set(str(path))
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_set(str(tmp_path / "gone.yaml"))


def test_a_recipe_takes_what_it_leaves_out_from_the_set(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(HEAD + A + "text: t\nsamples: 7\nsequence_length: 33\npacking: false\nseed: 5\n")
    section = Calibration.model_validate({"set": str(path), "samples": 9})
    assert (section.samples, section.sequence_length, section.packing, section.seed) == (9, 33, False, 5)
    assert (section.batch_size, Calibration.model_validate({"set": "ultrachat"}).samples) == (8, 512)
    assert Calibration.model_validate({"set": "gone"}).samples == 512  # that there is no such set is told elsewhere


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The Hub's answer to which commit a branch is at, a new one each time; returns what it was asked."""
    asked: list[tuple[str, str]] = []

    def dataset_info(_: object, repo: str, *, revision: str) -> SimpleNamespace:
        asked.append((repo, revision))
        return SimpleNamespace(sha=COMMIT[len(asked) :] + COMMIT[: len(asked)])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    hub_module.dataset_commit.cache_clear()
    yield asked
    hub_module.dataset_commit.cache_clear()


def test_a_branch_is_resolved_to_a_commit_once(hub: list[tuple[str, str]]) -> None:
    chosen = load_set("ultrachat")
    commit = at_commit(chosen).revision
    assert commit == COMMIT[1:] + COMMIT[:1]
    assert at_commit(chosen).revision == commit
    assert hub == [("HuggingFaceH4/ultrachat_200k", "main")]
    pinned = replace(chosen, revision=COMMIT)
    assert (at_commit(pinned), at_commit(load_set("tiny"))) == (pinned, load_set("tiny"))
    assert len(hub) == 1


def test_the_commit_is_in_the_fingerprint(hub: list[tuple[str, str]]) -> None:
    section = Calibration.model_validate({"set": "ultrachat"})
    facts = calibrate.set_identity(section.set, Commits())
    assert facts["revision"] == COMMIT[1:] + COMMIT[:1]
    assert facts.keys().isdisjoint({"name", "description", "samples", "seed"})


def test_without_a_network_a_branch_is_planned_and_not_run() -> None:
    hub_module.dataset_commit.cache_clear()
    section = Calibration.model_validate({"set": "ultrachat"})
    assert calibrate.set_identity(section.set, Commits())["revision"] == "main"
    with pytest.raises(UserError, match=r"ultrachat_200k@main cannot be resolved to a commit: .*40-digit commit"):
        calibrate.pinned_set(section)
