"""Two folders ask the same question if, and only if, their digests are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.digest import template_digest, tokenizer_digest


def test_a_template_is_told_from_its_file_or_its_entry(tmp_path: Path) -> None:
    assert template_digest(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ a }}"}))
    by_entry = template_digest(tmp_path)
    assert by_entry is not None
    (tmp_path / "chat_template.jinja").write_text("{{ a }}")
    assert template_digest(tmp_path) == by_entry
    (tmp_path / "chat_template.jinja").write_text("{{ b }}")
    assert template_digest(tmp_path) not in (None, by_entry)
    (tmp_path / "additional_chat_templates").mkdir()
    with_tools = template_digest(tmp_path)
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{{ c }}")
    assert template_digest(tmp_path) != with_tools


def test_a_server_may_be_told_another(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ a }}")
    (tmp_path / "other.jinja").write_text("{{ b }}")
    assert template_digest(tmp_path, "{{ a }}") == template_digest(tmp_path)
    assert template_digest(tmp_path, str(tmp_path / "other.jinja")) == template_digest(tmp_path, "{{ b }}")


def test_a_tokenizer_that_was_saved_again_is_the_same(models: Any, tmp_path: Path) -> None:
    folder = models("llama")
    content = json.loads((folder / "tokenizer.json").read_text())
    turned = {**dict(reversed(content.items())), "truncation": {"max_length": 8}, "padding": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(turned, indent=7))
    assert tokenizer_digest(tmp_path) == tokenizer_digest(folder)
    content["model"]["vocab"]["w5"], content["model"]["vocab"]["w6"] = 6, 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_digest(tmp_path) != tokenizer_digest(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "merges.txt"])
def test_a_tokenizer_without_the_fast_file(tmp_path: Path, name: str) -> None:
    assert tokenizer_digest(tmp_path) is None
    (tmp_path / name).write_bytes(b"a b")
    one = tokenizer_digest(tmp_path)
    (tmp_path / name).write_bytes(b"a c")
    assert None not in (one, tokenizer_digest(tmp_path))
    assert tokenizer_digest(tmp_path) != one
