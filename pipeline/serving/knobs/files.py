"""Strict reading of the knob table's files: a misspelt key, fact, value or knob is refused with its file and line."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pipeline.errors import UserError
from pipeline.recipe.faults import YamlPath
from pipeline.recipe.yaml_positions import Document, parse
from pipeline.serving.knobs.table import (
    FACTS,
    KINDS,
    Condition,
    Knob,
    Rule,
    parse_condition,
    placeholders,
)
from pipeline.serving.versions import Version, parse_version

_KEYS = (
    *(
        "kind",
        "topic",
        "about",
        "vllm",
        "gaps",
        "replaced_by",
        "replaces",
        "default",
        "sweep",
        "guides",
        "disagreement",
    ),
    *("never", "rules"),
)
_RULE_KEYS = ("value", "when", "vllm", "why", "source")


def read_knobs(files: Mapping[str, str]) -> dict[str, Knob]:
    """The knobs of files, given as texts by their names. UserError where one is not what the table allows."""
    found: dict[str, Knob] = {}
    documents: dict[str, Document] = {}
    for file, text in files.items():
        reader = _Reader(parse(text, file))
        for name in reader.document.data:
            if name in found:
                raise reader.error(
                    (name,), f"{name} appears a second time, first in {documents[name].values[name,].file}"
                )
            documents[name] = reader.document
            found[name] = reader.knob(name)
    for name, knob in found.items():
        for key in ("replaced_by", "replaces"):
            for other in getattr(knob, key):
                _Reader(documents[name]).one_of((name, key), other, found, "a knob")
    return found


class _Reader:
    """One file, whose errors say where they stand."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def error(self, path: YamlPath, message: str) -> UserError:
        place = self.document.keys.get(path) or self.document.values[path]
        return UserError(f"{place.file}:{place.line}: {message}")

    def one_of(self, path: YamlPath, value: object, valid: Collection[str], what: str) -> str:
        if not isinstance(value, str) or value not in valid:
            near = difflib.get_close_matches(str(value), list(valid), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(valid)}"
            raise self.error(path, f"{value!r} is not {what}; {hint}")
        return value

    def only(self, path: YamlPath, mapping: object, valid: Collection[str]) -> dict[str, Any]:
        if not isinstance(mapping, dict):
            raise self.error(path, f"expected a mapping, found {mapping!r}")
        for key in mapping:
            self.one_of((*path, key), key, valid, "a key here")
        return mapping

    def text(self, path: YamlPath, value: object, *, needed: bool = False) -> str:
        if value is None and not needed:
            return ""
        if not isinstance(value, str) or not value.strip():
            raise self.error(path, f"expected text, found {value!r}; numbers stand in quotes")
        return " ".join(value.split())

    def texts(self, path: YamlPath, value: object) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(path, f"expected a list of texts, found {value!r}")
        return tuple(self.text((*path, index), item, needed=True) for index, item in enumerate(value))

    def versions(self, path: YamlPath, value: object) -> tuple[Version, Version]:
        if not isinstance(value, list) or len(value) != 2:
            raise self.error(path, f'expected [first, end) with "0.NN" or null, found {value!r}')
        bounds = []
        for index, bound in enumerate(value):
            if bound is not None and not isinstance(bound, str):
                raise self.error((*path, index), f"expected a version in quotes, found {bound!r}")
            bounds.append(parse_version(bound) if bound else ())
        return bounds[0], bounds[1]

    def knob(self, name: str) -> Knob:
        at: YamlPath = (name,)
        row = self.only(at, self.document.data[name], _KEYS)
        for key in ("kind", "topic", "about", "vllm"):
            if key not in row:
                raise self.error(at, f"{name}: missing key {key!r}")
        outside = row["vllm"] is None
        first, end = ((), ()) if outside else self.versions((*at, "vllm"), row["vllm"])
        kind = self.one_of((*at, "kind"), row["kind"], KINDS, "a kind of knob")
        rules = row.get("rules", [])
        if not isinstance(rules, list):
            raise self.error((*at, "rules"), f"expected a list of rules, found {rules!r}")
        never = self.text((*at, "never"), row.get("never"))
        if bool(rules) == bool(never):
            raise self.error(at, f"{name}: expected either rules, or `never` with the reason why none sets it")
        return Knob(
            name=name,
            kind=next(item for item in KINDS if item == kind),
            topic=self.text((*at, "topic"), row["topic"], needed=True),
            about=self.text((*at, "about"), row["about"], needed=True),
            outside=outside,
            first=first,
            end=end,
            gaps=tuple(self.versions((*at, "gaps", index), gap) for index, gap in enumerate(row.get("gaps", []))),
            replaced_by=self.texts((*at, "replaced_by"), row.get("replaced_by")),
            replaces=self.texts((*at, "replaces"), row.get("replaces")),
            default=self.text((*at, "default"), row.get("default")),
            sweep=self.texts((*at, "sweep"), row.get("sweep")),
            guides=self.texts((*at, "guides"), row.get("guides")),
            disagreement=self.text((*at, "disagreement"), row.get("disagreement")),
            never=never,
            rules=tuple(self.rule((*at, "rules", index), rule) for index, rule in enumerate(rules)),
        )

    def rule(self, at: YamlPath, row: object) -> Rule:
        mapping = self.only(at, row, _RULE_KEYS)
        for key in ("value", "why", "source"):
            if key not in mapping:
                raise self.error(at, f"a rule without {key!r}")
        value: str | Literal[True] = True
        if mapping["value"] is not True:
            value = self.text((*at, "value"), mapping["value"], needed=True)
            for name in placeholders(value):
                self.one_of((*at, "value"), name, FACTS, "a fact")
        when = self.only((*at, "when"), mapping.get("when", {}), FACTS)
        first, end = self.versions((*at, "vllm"), mapping.get("vllm", [None, None]))
        return Rule(
            value=value,
            when={name: self.condition((*at, "when", name), name, given) for name, given in when.items()},
            first=first,
            end=end,
            why=self.text((*at, "why"), mapping["why"], needed=True),
            source=self.text((*at, "source"), mapping["source"], needed=True),
        )

    def condition(self, at: YamlPath, name: str, given: object) -> Condition:
        allowed = FACTS[name]
        if isinstance(given, str):
            if allowed not in (int, float):
                raise self.error(at, f"{name} is text: expected a list of values, found {given!r}")
            try:
                return parse_condition(given)
            except ValueError as error:
                raise self.error(at, f"{name}: {error}") from None
        if not isinstance(given, list) or not given:
            raise self.error(at, f"{name}: expected a list of values or a comparison, found {given!r}")
        for index, value in enumerate(given):
            if isinstance(allowed, tuple):
                self.one_of((*at, index), value, allowed, f"a value of {name}")
            elif allowed is str and not isinstance(value, str):
                raise self.error((*at, index), f"{name}: expected text in quotes, found {value!r}")
            elif allowed in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise self.error((*at, index), f"{name}: expected a number, found {value!r}")
        return Condition(values=tuple(str(value) for value in given))
