"""A definition of a task that came with somebody's release is data: it runs nothing without trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.eval import harness, records, suites
from quantmint.eval.errors import DefinitionError
from quantmint.eval.foreign import sandbox_templates, untrusted

TASK: dict[str, Any] = {
    "task": "facts",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "facts.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{ question.strip() }}\nAnswer:{% if hint is defined %} ({{ hint | upper }}){% endif %}",
    "doc_to_choice": "{{ [a, b] }}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}
REACHING = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"


def written(folder: Path, **changes: Any) -> records.Document:
    (folder / "facts.jsonl").write_text('{"question": "x", "a": "1", "b": "2", "answer": 0}\n')
    (folder / "facts.yaml").write_text(yaml.safe_dump({**TASK, **changes}, sort_keys=False))
    return records.read(folder / "facts.yaml")


def test_data_needs_no_trust(tmp_path: Path) -> None:
    assert untrusted(written(tmp_path)) == ()
    for path in sorted(suites.TASKS_FOLDER.glob("*.yaml")):
        assert untrusted(records.read(path)) == (), path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"doc_to_text": REACHING}, "the attribute '__init__' in the template doc_to_text"),
        ({"doc_to_target": "{{ ''['__class__'] }}"}, "two underscores in the template doc_to_target"),
        ({"doc_to_choice": ["{{ lipsum() }}", "b"]}, "a call of 'lipsum'"),
        ({"description": "{% include 'x' %}"}, "include in the template description"),
        ({"doc_to_text": "{{ x | attr('y') }}"}, "the filter attr"),
        ({"process_docs": "x.y"}, "the key 'process_docs'"),
        ({"include": "other.yaml"}, "the key 'include'"),
        ({"use_prompt": "promptsource:x"}, "the key 'use_prompt'"),
        ({"dataset_path": "./code"}, "the data set './code'"),
        ({"dataset_kwargs": {"trust_remote_code": True}}, "the key dataset_kwargs.trust_remote_code"),
        ({"metric_list": [{"metric": "somebody/metric"}]}, "the metric 'somebody/metric'"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "the key metric_list.hf_evaluate"),
        ({"filter_list": [{"name": "x", "filter": [{"function": "custom"}]}]}, "the filter 'custom'"),
    ],
)
def test_what_may_run_code_needs_trust(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in untrusted(written(tmp_path, **changes)))
    with pytest.raises(DefinitionError, match="which may run code"):
        harness.materialise_tasks(tmp_path, ["facts"], tmp_path / "there")
    assert not list((tmp_path / "there").glob("*.yaml"))
    if "dataset_kwargs" not in changes:
        assert harness.materialise_tasks(tmp_path, ["facts"], tmp_path / "there", trusted=True) == ("facts",)


def test_templates_are_rendered_in_a_sandbox() -> None:
    from jinja2.exceptions import SecurityError
    from lm_eval import utils

    plain = utils.env
    try:
        sandbox_templates()
        assert utils.apply_template("{{ a.strip() | regex_replace('x', 'y') }}\n", {"a": " x "}) == "y\n"
        with pytest.raises(SecurityError):
            utils.apply_template(REACHING, {})
    finally:
        utils.env = plain
