"""Whether a server that somebody else started serves the checkpoint of a plan: what it says of itself, held against it.

HTTP tells a name, a folder, a length and a tokenizer, never the weights. On this machine the folder is proof, as long
as nobody wrote into it since the server started; elsewhere a server can be shown to be the wrong one, never the right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import ServingError
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.running.server import Server
from pipeline.serving.versions import parse_version

#: Words, digits, accents, two other scripts, an emoji and code: where tokenizers part ways.
_SAMPLE = "The quick brown fox, 1234567890 times; naïve façade 東京 привет 🙂\n\tdef f(x): return x**2"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``wrong`` shows that it is another model, ``unproven`` says what could not be seen, ``differs`` how it is served
    otherwise than planned. ``server`` has the name under which the model is served.
    """

    server: Server
    wrong: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


def examine(server: Server, plan: LaunchPlan) -> Verdict:
    """Ask the server what it is. Raises ServingError where it does not answer as vLLM does."""
    card = _card(server, plan)
    if card is None:
        names = ", ".join(str(model.get("id")) for model in _models(server)) or "nothing"
        return Verdict(server, wrong=(f"it serves {names}, expected {plan.served_model_name}",))
    server = replace(server, model_name=str(card["id"]))
    wrong, unproven, differs = [], [], []
    root, local = card.get("root"), is_local(server)
    here = Path(root).is_dir() if isinstance(root, str) else False
    if root is None:
        unproven.append("it does not say which folder it serves")
    elif local and here and not _same(Path(root), Path(plan.model)):
        wrong.append(f"it serves {root}, expected {plan.model}")
    elif not local or not here:
        unproven.append(f"it serves {root} on a machine whose files cannot be seen from here")
    elif (newer := _written_since(server, Path(plan.model))) is not None:
        unproven.append(f"{newer} was written after the server had started")
    tokens = _tokenizer(server, Path(plan.model))
    if tokens is False:
        wrong.append(f"its tokenizer is not the one of {plan.model}")
    length, needed = card.get("max_model_len"), plan.option("--max-model-len")
    if isinstance(length, int) and needed is not None and needed.isdigit() and length != int(needed):
        if length < int(needed):
            wrong.append(f"it takes {length:,} tokens a request, the plan needs {int(needed):,}")
        else:
            differs.append(f"it takes {length:,} tokens a request where the plan says {int(needed):,}")
    differs += _differences(server, plan)
    return Verdict(server, tuple(wrong), tuple(unproven), tuple(differs))


def is_local(server: Server) -> bool:
    """Whether the server's files are ours."""
    return urlsplit(server.base_url).hostname in _LOOPBACK


def _models(server: Server) -> list[Mapping[str, Any]]:
    try:
        return [dict(model) for model in json.loads(server.get("/v1/models"))["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ServingError(f"{server.base_url} does not list its models as vLLM does: {error}") from error


def _card(server: Server, plan: LaunchPlan) -> Mapping[str, Any] | None:
    """The entry of our model: by its name, else by its folder."""
    models = [model for model in _models(server) if "id" in model]
    named = [model for model in models if model["id"] == plan.served_model_name]
    rooted = [model for model in models if model.get("root") == plan.model]
    return next(iter([*named, *rooted]), None)


def _same(one: Path, other: Path) -> bool:
    return other.is_dir() and one.samefile(other)


def _written_since(server: Server, model: Path) -> str | None:
    """A file of the checkpoint that is younger than the server's process, if its metrics tell when that began."""
    began = [sample.value for sample in server.metrics() if sample.name == "process_start_time_seconds"]
    if not began:
        return None
    files = [*model.glob("*.safetensors"), *model.glob("*.json")]
    return next((path.name for path in sorted(files) if path.stat().st_mtime > began[0]), None)


def _tokenizer(server: Server, model: Path) -> bool | None:
    """Whether the server splits a text as the checkpoint's tokenizer does; None where that cannot be told."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    question = {"model": server.model_name, "prompt": _SAMPLE, "add_special_tokens": False}
    try:
        answer = json.loads(server.post("/tokenize", question))["tokens"]
    except (ServingError, ValueError, KeyError, TypeError):  # a gateway between us need not pass it on
        return None
    return bool(answer == Tokenizer.from_file(str(file)).encode(_SAMPLE, add_special_tokens=False).ids)


def _differences(server: Server, plan: LaunchPlan) -> list[str]:
    found = []
    version = server.version()
    if plan.vllm_version and parse_version(version) != parse_version(plan.vllm_version):
        found.append(f"it is vLLM {version}, the plan was made for {plan.vllm_version}")
    # The label says "auto" also where the checkpoint brought FP8, so that word proves nothing.
    said, planned = server.cache_config().get("cache_dtype", "auto"), plan.option("--kv-cache-dtype") or "auto"
    if said != "auto" and said[:3] != planned[:3]:
        found.append(f"its KV cache is {said}, the plan's {planned}")
    return found
