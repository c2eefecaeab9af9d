"""Limit what a task definition may ask lm-eval to do where its author is not trusted.

lm-eval runs much of what a definition names: functions, builders of data sets, metrics of the Hub, and Jinja templates,
which reach Python's own objects unless they are sandboxed. A definition that came with somebody's release is data, so
its keys, metrics and templates are those of a list; a recipe with `trust_remote_code: true` takes any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from quantmint.eval.records import Document

KEYS: Final = frozenset(
    (
        "task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "training_split",
        "validation_split", "test_split", "fewshot_split", "output_type", "doc_to_text", "doc_to_target",
        "doc_to_choice", "description", "target_delimiter", "fewshot_delimiter", "num_fewshot", "repeats", "gen_prefix",
        "generation_kwargs", "filter_list", "metric_list", "should_decontaminate", "doc_to_decontamination_query",
        "metadata",
    )
)  # fmt: skip
"""Keys of lm-eval's definitions whose values are text, numbers or names of a list."""
METRICS: Final = frozenset(
    (
        "acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "word_perplexity", "byte_perplexity",
        "bits_per_byte", "perplexity", "likelihood", "brier_score", "mcc", "f1", "bleu", "chrf", "ter",
    )
)  # fmt: skip
"""Metrics of lm-eval's own; any other name is looked for on the Hub, as code."""
AGGREGATIONS: Final = frozenset(
    ("mean", "median", "perplexity", "weighted_perplexity", "bits_per_byte", "nanmean", "f1", "matthews_corrcoef",
     "bleu", "chrf", "ter", "brier_score")
)  # fmt: skip
FILTERS: Final = frozenset(
    ("regex", "regex_pos", "remove_whitespace", "multi_choice_regex", "take_first", "take_first_k", "majority_vote",
     "lowercase", "uppercase", "map", "decontaminate")
)  # fmt: skip
_METRIC_KEYS: Final = frozenset(
    ("metric", "aggregation", "higher_is_better", "ignore_case", "ignore_punctuation", "ignore_numbers",
     "regexes_to_ignore", "multi_label")
)  # fmt: skip
_BUILDERS: Final = frozenset(("json", "csv", "parquet", "text", "arrow"))
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_METHODS: Final = frozenset(
    ("strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "replace", "split", "rsplit", "splitlines",
     "join", "startswith", "endswith", "removeprefix", "removesuffix", "index", "find", "count", "items", "keys",
     "values", "get", "range")
)  # fmt: skip


def untrusted(definition: Document) -> tuple[str, ...]:
    """Return a sentence for each part of a task definition that only a trusted author may write."""
    data = definition.data
    parts = [f"the key {key!r}" for key in data if key not in KEYS]
    path = data.get("dataset_path")
    if path is not None and path not in _BUILDERS and not (isinstance(path, str) and _REPOSITORY.fullmatch(path)):
        parts.append(f"the data set {path!r:.60}")
    options = data.get("dataset_kwargs") or {}
    parts += [f"the key dataset_kwargs.{key}" for key in options if key != "data_files"]
    for entry in _entries(data.get("metric_list")):
        parts += [f"the key metric_list.{key}" for key in entry if key not in _METRIC_KEYS]
        if entry.get("metric") not in METRICS:
            parts.append(f"the metric {entry.get('metric')!r:.60}")
        if entry.get("aggregation", "mean") not in AGGREGATIONS:
            parts.append(f"the aggregation {entry['aggregation']!r:.60}")
    for entry in _entries(data.get("filter_list")):
        names = [step.get("function") for step in _entries(entry.get("filter"))]
        parts += [f"the filter {name!r:.60}" for name in names if name not in FILTERS]
    for key, text in _texts(data):
        parts += [f"{reason} in the template {key}" for reason in _reaching(text)]
    return tuple(f"{definition.path.name} has {part}" for part in dict.fromkeys(parts))


def _entries(value: Any) -> Iterator[Mapping[str, Any]]:
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        yield entry if isinstance(entry, Mapping) else {"": entry}


def _texts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every text that lm-eval may render as a Jinja template."""
    for key, value in data.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and ("{{" in text or "{%" in text):
                yield key, text


def _reaching(template: str) -> Iterator[str]:
    """Yield a phrase for each part of a Jinja template that does more than fill in fields of a document."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import SandboxedEnvironment

    try:
        tree = SandboxedEnvironment().parse(template)
    except (TemplateError, RecursionError):
        yield "something that cannot be parsed"
        return
    for node in tree.find_all(nodes.Node):
        if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
            yield f"the attribute {node.attr!r:.60}"
        elif isinstance(node, nodes.Filter) and node.name in ("attr", "map", "pprint"):
            yield f"the filter {node.name}"
        elif isinstance(node, nodes.Const) and isinstance(node.value, str) and "__" in node.value:
            yield "a name with two underscores"
        elif isinstance(node, nodes.Call):
            name = getattr(node.node, "attr", getattr(node.node, "name", None))
            if name not in _METHODS:
                yield f"a call of {name!r:.60}"
        elif isinstance(node, nodes.Include | nodes.Import | nodes.FromImport | nodes.Extends | nodes.Macro):
            yield f"{type(node).__name__.lower()}"


def sandbox_templates() -> None:
    """Replace lm-eval's Jinja environment in this process by a sandboxed one, for every author's templates."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    plain = utils.env
    if isinstance(plain, SandboxedEnvironment):
        return
    sandboxed = SandboxedEnvironment(
        loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
    )
    sandboxed.filters.update(plain.filters)
    utils.env = sandboxed
