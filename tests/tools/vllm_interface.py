"""What one version of vLLM accepts, read from its source without running it.

    python -m tests.tools.vllm_interface vllm-0.34.0.tar.gz vllm-0.33.0/

Takes source distributions, packed or unpacked (an unpacked wheel is as good), and enters each
into the table ``tests/assets/vllm.tsv``, a line an entry: KIND, NAME, FIRST and LAST version that has it. Kinds are

    flags    option strings of `vllm serve`, with the --no- forms of switches
    bench    option strings of `vllm bench`
    env      VLLM_* variables of envs.py
    another  an option or variable: the values that a Literal, an enumeration or a list of choices allows

The arguments of the engine are the ``add_argument`` calls of engine/arg_utils.py; those of the frontend are the fields
of ``FrontendArgs`` wherever that class lives. A switch is what the field's type says: argparse gives it a --no- form.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from quantmint.pipeline.serving.environment import parse_version

Interface: TypeAlias = dict[str, set[str]]
TABLE: Final = Path(__file__).parents[1] / "assets" / "vllm.tsv"
HEADER: Final = (
    "# What each version of vLLM accepts: KIND, NAME, FIRST and LAST version. Made by tests/tools/vllm_interface.py.",
    "# Two that AMD's images for Instinct pin, 0.19 (rocm/vllm:rocm7.13.0_*_vllm_0.19.1) and 0.23 (rocm7.14.1_cdna_*),",
    "# the last eight that are known, 0.26 to 0.33 (AMD's images of ROCm 10 have 0.27 and 0.29), and those between.",
)
_BACKENDS = "AttentionBackendEnum"
_CHOICES_OF_FIELDS = {
    "--kv-cache-dtype": ("CacheConfig", "cache_dtype"),
    "--all2all-backend": ("ParallelConfig", "all2all_backend"),
    "--mm-encoder-tp-mode": ("MultiModalConfig", "mm_encoder_tp_mode"),
    "--distributed-executor-backend": ("ParallelConfig", "distributed_executor_backend"),
    "--block-size": ("CacheConfig", "block_size"),
    "--mamba-cache-mode": ("CacheConfig", "mamba_cache_mode"),
    "--quantization": ("ModelConfig", "quantization"),
}


@dataclass
class _Source:
    """Classes, type aliases and enumerations of a tree, by name."""

    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    aliases: dict[str, ast.expr] = field(default_factory=dict)

    def add(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
        for node in tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.aliases.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.aliases.setdefault(node.target.id, node.value)

    def annotation(self, name: str, attribute: str) -> ast.expr | None:
        """The type of a class's field, its bases included."""
        node = self.classes.get(name)
        if node is None:
            return None
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == attribute:
                return item.annotation
        for base in node.bases:
            found = self.annotation(base.id, attribute) if isinstance(base, ast.Name) else None
            if found is not None:
                return found
        return None

    def fields(self, name: str) -> Iterator[tuple[str, ast.expr]]:
        """Fields of a dataclass with their types, those of its bases first."""
        node = self.classes[name]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                yield from self.fields(base.id)
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                yield item.target.id, item.annotation

    def members(self, annotation: ast.expr | None) -> set[str]:
        """Names in a type: {"bool", "None"} for `bool | None`; string annotations are parsed."""
        if annotation is None:
            return set()
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self.members(ast.parse(annotation.value, mode="eval").body)
        if isinstance(annotation, ast.Constant):
            return {"None"} if annotation.value is None else set()
        if isinstance(annotation, ast.BinOp):
            return self.members(annotation.left) | self.members(annotation.right)
        if isinstance(annotation, ast.Name):
            return {annotation.id}
        if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
            if annotation.value.id in {"Optional", "Union", "Annotated", "SkipValidation"}:
                inner = annotation.slice
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                more = {"None"} if annotation.value.id == "Optional" else set()
                return more.union(*map(self.members, parts))
            return {annotation.value.id}
        return set()

    def is_switch(self, annotation: ast.expr | None) -> bool:
        """Whether vLLM's get_kwargs makes --x and --no-x of a field; `bool | str | None` is an option instead."""
        members = self.members(annotation)
        return "bool" in members and members != {"bool", "str", "None"}

    def literals(self, node: ast.expr | None) -> list[str]:
        """Text values of every Literal in a type, aliases followed."""
        if node is None:
            return []
        found: list[str] = []
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            for item in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                if isinstance(item, ast.Constant):
                    found.append(str(item.value))
                else:
                    found += self.literals(item)
        elif isinstance(node, ast.Name):
            alias = self.aliases.get(node.id)
            found += [] if alias is None else self.literals(alias)
        elif isinstance(node, ast.BinOp):
            found += self.literals(node.left) + self.literals(node.right)
        elif isinstance(node, ast.Subscript):
            for item in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                found += self.literals(item)
        return list(dict.fromkeys(found))


def interface(root: Path) -> Interface:
    """What the version in a source folder (the one that holds ``vllm/``) accepts."""
    package = root / "vllm"
    source = _Source()
    entry = _defining(package / "entrypoints", "class FrontendArgs")
    enumeration = next(
        path
        for path in sorted((package / "v1" / "attention" / "backends").rglob("*.py"))
        if re.search(rf"^class {_BACKENDS}\b", path.read_text(encoding="utf-8"), re.M)
    )
    arguments = ast.parse((package / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    trees = [arguments, _parse(entry), _parse(enumeration)]
    for tree in (*trees, *map(_parse, sorted((package / "config").rglob("*.py")))):
        source.add(tree)
    environment, choices = _environment(_parse(package / "envs.py"))
    flags = _added(arguments, source) | _added(trees[1], source) | _frontend(source)
    for flag, (owner, name) in _CHOICES_OF_FIELDS.items():
        values = source.literals(source.annotation(owner, name))
        if flag in flags and values:
            choices[flag] = values
    choices["--attention-backend"] = _backends(source)
    bench: set[str] = set().union(*(_added(_parse(path), source) for path in (package / "benchmarks").rglob("*.py")))
    return {
        "flags": flags,
        "bench": bench,
        "env": environment,
        **{name: set(values) for name, values in choices.items() if values},
    }


def _version(root: Path) -> str:
    text = (root / "PKG-INFO").read_text(encoding="utf-8") if (root / "PKG-INFO").exists() else ""
    found = re.search(r"^Version: (\S+)", text, re.M) or re.search(r"vllm-(\d+\.\d+\.\d+\S*?)/?$", str(root))
    if found is None:
        raise SystemExit(f"{root}: neither PKG-INFO nor the folder's name says which version this is")
    return found[1]


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _defining(folder: Path, text: str) -> Path:
    for path in sorted(folder.rglob("cli_args.py")):
        if re.search(rf"^{text}\b", path.read_text(encoding="utf-8"), re.M):
            return path
    raise SystemExit(f"{folder}: no cli_args.py says {text!r}")


def _added(tree: ast.Module, source: _Source) -> set[str]:
    """Option strings of every add_argument with constant names, with --no- forms of switches."""
    owners: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            call = node.value
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "get_kwargs":
                assert isinstance(call.args[0], ast.Name)
                owners[node.targets[0].id] = call.args[0].id
    flags: set[str] = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "add_argument":
            continue
        names = [str(item.value) for item in node.args if isinstance(item, ast.Constant)]
        names = [name for name in names if name.startswith("-")]
        flags.update(names)
        if _is_boolean(node, owners, source):
            flags.update("--no-" + name.removeprefix("--") for name in names if name.startswith("--"))
    return flags


def _is_boolean(call: ast.Call, owners: dict[str, str], source: _Source) -> bool:
    for keyword in call.keywords:
        if keyword.arg == "action":
            return "BooleanOptionalAction" in ast.unparse(keyword.value)
        for part in ast.walk(keyword.value) if keyword.arg is None else ():  # **kwargs["x"], or {**kwargs["x"], ...}
            if not (isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name)):
                continue
            owner = owners.get(part.value.id)
            if owner is not None and isinstance(part.slice, ast.Constant):
                return source.is_switch(source.annotation(owner, str(part.slice.value)))
    return False


def _frontend(source: _Source) -> set[str]:
    flags: set[str] = set()
    for name, annotation in source.fields("FrontendArgs"):
        flag = f"--{name.replace('_', '-')}"
        flags.add(flag)
        if source.is_switch(annotation):
            flags.add(f"--no-{flag.removeprefix('--')}")
    return flags


def _backends(source: _Source) -> list[str]:
    targets = [item.targets[0] for item in source.classes[_BACKENDS].body if isinstance(item, ast.Assign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _environment(tree: ast.Module) -> tuple[set[str], dict[str, list[str]]]:
    """VLLM_* keys of the dictionary of variables, with the values of those that have a list of them."""
    names: set[str] = set()
    choices: dict[str, list[str]] = {}
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if not (isinstance(target, ast.Name) and target.id == "environment_variables"):
            continue
        assert isinstance(node, ast.AnnAssign)
        assert isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if not (isinstance(key, ast.Constant) and str(key.value).startswith("VLLM_")):
                continue
            names.add(str(key.value))
            listed = value.args[2:3] if isinstance(value, ast.Call) and "choices" in ast.unparse(value.func) else []
            if listed and isinstance(listed[0], ast.List):
                choices[str(key.value)] = [str(item.value) for item in listed[0].elts if isinstance(item, ast.Constant)]
    return names, choices


def read_table(path: Path = TABLE) -> dict[str, Interface]:
    """Every version of the table, the oldest first: the names of each kind."""
    lines = path.read_text(encoding="utf-8").splitlines()
    versions = next(line.split()[2:] for line in lines if line.startswith("# versions:"))
    found: dict[str, Interface] = {version: {} for version in versions}
    for kind, name, first, last in (line.split("\t") for line in lines if not line.startswith("#")):
        for version in versions[versions.index(first) : versions.index(last) + 1]:
            found[version].setdefault(kind, set()).add(name)
    return found


def table_text(interfaces: Mapping[str, Interface]) -> str:
    """The table of these versions; an entry that went and came back has a line for each time."""
    versions = sorted(interfaces, key=parse_version)
    entries = sorted({(kind, name) for found in interfaces.values() for kind, names in found.items() for name in names})
    lines = [*HEADER, f"# versions: {' '.join(versions)}"]
    for kind, name in entries:
        there = [name in interfaces[version].get(kind, ()) for version in versions]
        for has, run in itertools.groupby(range(len(versions)), key=there.__getitem__):
            if has:
                numbers = list(run)
                lines.append(f"{kind}\t{name}\t{versions[numbers[0]]}\t{versions[numbers[-1]]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="vllm-X.Y.Z.tar.gz, or its unpacked folder")
    given = parser.parse_args()
    interfaces = read_table()
    for path in given.sources:
        with tempfile.TemporaryDirectory() as scratch:
            root = path
            if path.is_file():
                with tarfile.open(path) as archive:
                    wanted = [item for item in archive if item.name.endswith((".py", "PKG-INFO"))]
                    archive.extractall(scratch, members=wanted, filter="data")
                root = next(Path(scratch).iterdir())
            version, found = _version(root), interface(root)
        sys.stdout.write(f"{version}: {len(found['flags'])} options, {len(found['env'])} variables\n")
        interfaces[version] = found
    TABLE.write_text(table_text(interfaces), encoding="utf-8")


if __name__ == "__main__":
    main()
