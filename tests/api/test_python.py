"""The Python API: the examples of its page run as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import quantmint

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_examples_of_the_page_run(
    models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models("llama"), tmp_path / "models" / "llama")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(compile(example, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    printed = capsys.readouterr().out
    assert "x smaller, inspection: PASS\n" in printed
    assert "['source', 'quantize', 'inspect'] None\n" in printed
    again = quantmint.quantize("models/llama", "out", "ptpc_fp8")
    assert (again.made, again.schemes) == (False, {"ptpc_fp8": 14})


def test_a_mistake_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(quantmint.UserError, match=r"config\.json: no such file"):
        quantmint.inspect(tmp_path)
    with pytest.raises(quantmint.QuantmintError, match="did you mean"):
        quantmint.load_recipe("tiny-ptcp")


def test_importing_the_package_imports_nothing_else() -> None:
    listed = "sorted(name for name in sys.modules if name.startswith('quantmint'))"
    code = f"import sys, quantmint; print({listed}, dir(quantmint)[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['quantmint'] LoadedRecipe\n"
