"""The commit that a fingerprint names is the one that lm-eval's tasks read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness_child import dataset_of, reading
from tests.hub.standin import HubStandIn

FIRST, SECOND = "e5" * 20, "7a" * 20
ROOT = Path(__file__).parents[2]
READ = """
import sys
from quantmint.eval.harness_child import dataset_of, reading
from lm_eval.api.task import ConfigurableTask
task = {
    "task": "t", "dataset_path": "my-org/set", "test_split": "train", "output_type": "generate_until",
    "doc_to_text": "{{text}}", "doc_to_target": "{{text}}", "metric_list": [{"metric": "exact_match"}],
}
for commits in ({"my-org/set": sys.argv[1]}, {}):
    with reading(commits):
        loaded = ConfigurableTask(config=dict(task))
    print([row["text"] for row in loaded.test_docs()], dataset_of(loaded, commits)["commit"] == sys.argv[1])
"""


def loaded(path: str, *commits: str) -> Any:
    """A task as lm-eval leaves it, with what `datasets` remembers of its download."""
    checksums = {f"hf://datasets/{path}@{commit}/test.parquet": {} for commit in commits}
    split = SimpleNamespace(info=SimpleNamespace(download_checksums=checksums))
    return SimpleNamespace(config=SimpleNamespace(dataset_path=path, dataset_name=None), dataset={"test": split})


@pytest.mark.slow
def test_a_task_reads_the_commit_that_it_is_given(hub: HubStandIn) -> None:
    """A real task of lm-eval, by its own code, from a Hub whose branch has moved since."""
    before = hub.put("datasets/my-org/set", {"train.jsonl": b'{"text": "one"}\n'})
    hub.put("datasets/my-org/set", {"train.jsonl": b'{"text": "two"}\n{"text": "three"}\n'})
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", READ, before],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["['one'] True", "['two', 'three'] False"]


def test_only_what_is_named_is_read_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def load(path: str, name: str | None = None, **options: Any) -> None:
        asked.append((path, options.get("revision")))

    monkeypatch.setattr("datasets.load_dataset", load)
    with reading({"org/one": FIRST}):
        import datasets

        datasets.load_dataset(path="org/one", name="x")
        datasets.load_dataset("org/two", revision="v1")
    assert asked == [("org/one", FIRST), ("org/two", "v1")]
    assert datasets.load_dataset is load


def test_another_commit_than_the_one_that_was_wanted() -> None:
    found = dataset_of(loaded("org/one", FIRST), {"org/one": FIRST})
    assert found == {"path": "org/one", "name": None, "commit": FIRST}
    unsaid = dataset_of(loaded("org/one"), {"org/one": FIRST})
    assert unsaid is not None
    assert unsaid["commit"] == FIRST  # `datasets` remembers nothing, and was asked for nothing else
    with pytest.raises(MeasurementError, match=f"org/one was to be read at commit {FIRST}, and {SECOND} is what"):
        dataset_of(loaded("org/one", SECOND), {"org/one": FIRST})
