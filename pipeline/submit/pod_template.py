"""What a cluster wants of every pod, from a file: tolerations, a service account, pull secrets, sidecars, volumes.

    >>> given = read_template(Path("pod.yaml"))  # spec: {priorityClassName: batch, tolerations: [{operator: Exists}]}
    >>> given.spec["priorityClassName"]
    'batch'

The file is a PodTemplateSpec (``metadata``, ``spec``), a whole Pod or PodTemplate, or a ``spec`` alone. Each field is
held against the models of the installed Kubernetes client, so that a misspelt one is told here with its line: the API
leaves out what it does not know, and a pod without its toleration waits for ever. `pipeline.submit.joining` puts it
together with a pod of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError
from pipeline.recipe.faults import Fault, Place, YamlPath, did_you_mean, refuse, shown, shown_path
from pipeline.recipe.translate import place_of
from pipeline.recipe.yaml_positions import Document, parse, text_of
from pipeline.serving.running.child_environment import SECRET

_PLAIN: Mapping[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "datetime": ((str,), "text"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}
_LIST = re.compile(r"list\[(.+)\]")
_MAP = re.compile(r"dict[\[(]str, (.+)[\])]")
_QUANTITIES = {
    ("V1ResourceRequirements", "limits"),
    ("V1ResourceRequirements", "requests"),
    ("V1VolumeResourceRequirements", "limits"),
    ("V1VolumeResourceRequirements", "requests"),
    ("V1PodSpec", "overhead"),
    ("V1EmptyDirVolumeSource", "sizeLimit"),
    ("V1ResourceFieldSelector", "divisor"),
}
"""Fields that the client has as text, and in which the API takes numbers as well."""
_METADATA = ("labels", "annotations")
_IGNORED = ("name", "generateName", "creationTimestamp")
"""What a template has to have for some tools; a Job names its pods itself."""
_OCTAL = re.compile(r"(?:[&!]\S*\s+)*([-+]?0[0-7]+)\b")  # after an anchor and a tag
_QUANTITY = re.compile(r"\+?(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?\d{1,2})?")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_LOCATES = re.compile(r"_(FILE|PATH|DIR)$")


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A file's pod: nulls are left out, and quantities are text. ``root`` is where its ``spec`` stands in the file."""

    document: Document
    root: YamlPath
    spec: Mapping[str, Any]
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def fault(self, path: YamlPath, message: str, *, metadata: bool = False) -> RecipeError:
        """What is wrong at a path of the ``spec``, or of the ``metadata`` beside it, at its line."""
        at = (*self.root[:-1], "metadata", *path) if metadata else (*self.root, *path)
        return RecipeError(str(Fault(place_of(at, self.document), at, message)))

    def working_folder(self, container: str) -> str | None:
        """Where the file lets a container start; None where it says nothing."""
        folders = (item.get("workingDir") for item in self.spec.get("containers", ()) if item["name"] == container)
        return next(folders, None)


def read_template(path: Path) -> PodTemplate:
    """Read a file; `RecipeError`, with each line, for what is no pod of Kubernetes or holds a secret."""
    text = text_of(path)
    try:
        document = parse(text, shown_path(path))
    except RecipeError as error:
        if "{{" not in text:
            raise
        raise RecipeError(
            error.message, hint="It reads like a template of Helm: `helm template` fills it in."
        ) from error
    return _Reader(document, text.splitlines()).template()


class _Reader:
    def __init__(self, document: Document, lines: list[str]) -> None:
        self._document = document
        self._lines = lines
        self._faults: list[Fault] = []

    def template(self) -> PodTemplate:
        data, metadata, spec = self._parts()
        for number, line in enumerate(self._lines, 1):
            if found := _TOKEN.search(line):
                file = self._document.values[()].file
                place = Place(file, number, found.start() + 1)
                self._faults.append(Fault(place, (), "found a token of the Hub, expected a secretKeyRef"))
        labels, annotations = self._metadata(metadata, data.get("metadata")) if "metadata" in data else ({}, {})
        checked: dict[str, Any] = {}
        if (content := self._at(spec)) is not None:
            checked = self._checked(content, "V1PodSpec", spec)
        for kind in ("initContainers", "containers"):
            for number, container in enumerate(_listed(checked, kind)):
                self._secrets(container, (*spec, kind, number))
        if "ephemeralContainers" in checked:
            self._fault((*spec, "ephemeralContainers"), "found containers that only a pod that runs may be given")
        refuse(self._faults)
        return PodTemplate(self._document, spec, checked, labels, annotations)

    def _parts(self) -> tuple[Mapping[str, Any], YamlPath, YamlPath]:
        """The mapping that has ``metadata``, with the paths of that and of the ``spec``."""
        data = self._document.data
        if "kind" not in data:
            if "spec" in data or "metadata" in data:
                self._only(data, (), ("metadata", "spec"))
                return data, ("metadata",), ("spec",)
            return {}, (), ()
        kind = data["kind"]
        if kind == "PodTemplate":
            self._only(data, (), ("apiVersion", "kind", "metadata", "template"))
            inner = data.get("template")
            if not isinstance(inner, dict):
                self._fault(("template",), f"found {shown(inner)}, expected a mapping with metadata and spec")
                return {}, ("template", "metadata"), ("template", "spec")
            self._only(inner, ("template",), ("metadata", "spec"))
            return inner, ("template", "metadata"), ("template", "spec")
        if kind != "Pod":
            self._fault(("kind",), f"found {shown(kind)}, expected Pod, PodTemplate, or metadata and spec without one")
        else:
            self._only(data, (), ("apiVersion", "kind", "metadata", "spec", "status"))
        if data.get("apiVersion", "v1") != "v1" and kind == "Pod":
            self._fault(("apiVersion",), f'found {shown(data["apiVersion"])}, expected "v1"')
        return data, ("metadata",), ("spec",)

    def _metadata(self, path: YamlPath, given: Any) -> tuple[dict[str, str], dict[str, str]]:
        if given is None:
            return {}, {}
        known = self._checked(given, "V1ObjectMeta", path)
        for name in known if isinstance(known, dict) else ():
            if name not in (*_METADATA, *_IGNORED):
                instead = "--namespace says it" if name == "namespace" else "the Job has its own"
                self._fault((*path, name), f"found {name}, expected labels or annotations: {instead}")
        labels, annotations = (known.get(name, {}) if isinstance(known, dict) else {} for name in _METADATA)
        return labels, annotations

    def _checked(self, value: Any, kind: str, path: YamlPath) -> Any:
        """The value without nulls; what is not of that kind becomes a fault."""
        if listed := _LIST.fullmatch(kind):
            if not isinstance(value, list):
                return self._expected(value, "a list", path)
            return [self._checked(item, listed[1], (*path, number)) for number, item in enumerate(value)]
        if mapped := _MAP.fullmatch(kind):
            if not isinstance(value, dict):
                return self._expected(value, "a mapping", path)
            return {key: self._checked(item, mapped[1], (*path, key)) for key, item in value.items()}
        if kind in _PLAIN:
            types, words = _PLAIN[kind]
            if type(value) not in types:
                instead = f' (write "{value}")' if words == "text" and type(value) in (int, float) else ""
                return self._expected(value, words + instead, path)
            return self._number(value, path) if kind == "int" else value
        return value if kind == "object" else self._object(value, kind, path)

    def _object(self, value: Any, kind: str, path: YamlPath) -> Any:
        from kubernetes import client

        if not isinstance(value, dict):
            return self._expected(value, "a mapping", path)
        model = getattr(client, kind)
        fields = {given: own for own, given in model.attribute_map.items()}
        checked: dict[str, Any] = {}
        for name, item in value.items():
            if name not in fields:
                where = kind.removeprefix("V1")
                near = did_you_mean(name, fields)
                said = f'found "{name}", expected a field of {where} in Kubernetes\' API{near}'
                said = "found a merge key, expected its fields: merging is not in YAML 1.2" if name == "<<" else said
                self._fault((*path, name), said, key=True)
            elif item is not None:
                if (kind, name) in _QUANTITIES:
                    item = self._quantities(item, (*path, name))
                checked[name] = self._checked(item, model.openapi_types[fields[name]], (*path, name))
        self._complete(model, {fields[name]: item for name, item in checked.items()}, path)
        return checked

    def _complete(self, model: Any, values: dict[str, Any], path: YamlPath) -> None:
        """A fault where the API needs a field that is not there; the containers of a pod are ours."""
        if model.__name__ == "V1PodSpec":
            values.setdefault("containers", [])
        try:
            model(**values)
        except ValueError as error:
            named = re.search(r"`(\w+)`", str(error))
            missing = model.attribute_map.get(named[1], named[1]) if named else str(error)
            self._fault(path, f"found no {missing}, which {model.__name__.removeprefix('V1')} needs")

    def _quantities(self, value: Any, path: YamlPath) -> Any:
        if isinstance(value, dict):
            return {key: self._quantities(item, (*path, key)) for key, item in value.items()}
        text = str(value) if type(value) in (int, float) else value
        if isinstance(text, str) and not _QUANTITY.fullmatch(text):
            self._expected(value, "a quantity such as 8, 500m or 64Gi", path)
        return text

    def _number(self, value: int, path: YamlPath) -> int:
        place = place_of(path, self._document)
        written = self._lines[place.line - 1][place.column - 1 :]
        if octal := _OCTAL.match(written):
            meant = int(octal[1], 8)
            self._fault(path, f"found {octal[1]}, which is {meant} or {value} to different readers; write {meant}")
        return value

    def _secrets(self, container: Any, path: YamlPath) -> None:
        for number, entry in enumerate(_listed(container, "env")):
            name, value = entry.get("name", ""), entry.get("value")
            if not value or not isinstance(name, str) or not SECRET.search(name):
                continue
            if not (_LOCATES.search(name) and str(value).startswith("/")):
                said = f"found the value of {name}, which everyone reads who may read the manifest; expected "
                said += "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}"
                self._fault((*path, "env", number), said)

    def _only(self, data: Mapping[str, Any], path: YamlPath, known: tuple[str, ...]) -> None:
        for name in data:
            if name not in known:
                said = f'found "{name}", expected {", ".join(known)}{did_you_mean(name, known)}'
                self._fault((*path, name), said, key=True)

    def _at(self, path: YamlPath) -> Any:
        value: Any = self._document.data
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _expected(self, value: Any, words: str, path: YamlPath) -> Any:
        self._fault(path, f"found {shown(value)}, expected {words}")
        return value

    def _fault(self, path: YamlPath, message: str, *, key: bool = False) -> None:
        self._faults.append(Fault(place_of(path, self._document, key=key), path, _TOKEN.sub("hf_...", message)))


def _listed(data: Any, name: str) -> list[dict[str, Any]]:
    """The mappings of a list that may not be there, or be something else."""
    found = data.get(name) if isinstance(data, dict) else None
    return [item if isinstance(item, dict) else {} for item in found] if isinstance(found, list) else []
