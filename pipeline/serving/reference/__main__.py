"""Load one checkpoint, then answer on a socket until its other end is closed: `eval.harness_child`'s messages, and

``facts``            what computes: version, runtime, device, kv_cache_dtype
``prompt_logprobs``  what the model says of the tokens ``ids``, and the ``likeliest`` of each position
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.errors import QuantmintError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Load and answer; returns an exit code where that did not come about."""
    parser = argparse.ArgumentParser(
        prog="python -m quantmint.pipeline.serving.reference",
        description="Answer through transformers, computed as the checkpoint's format means it.",
    )
    add = parser.add_argument
    add("model", help="folder of a checkpoint")
    add("socket", help="path of the socket of whoever asks, or @ and an abstract name")
    add("--served-model-name", help="not used: who asks has one model")
    add("--max-model-len", type=int, help="not used: who asks says it")
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8: refuse a checkpoint without scales for its cache (default: what the checkpoint says)",
    )
    add("--device", default="auto", help="PyTorch's name of a device (default: a GPU where there is one)")
    add("--trust-remote-code", action="store_true", help="run Python code of the model's folder")
    options = parser.parse_args(arguments)
    try:
        _answer(options)
    except QuantmintError as error:
        hint = f" {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)  # noqa: T201 - this is a program
        return error.exit_code
    return 0


def _answer(options: argparse.Namespace) -> None:
    from quantmint.eval.harness_child import Session, Tell, answer_on
    from quantmint.pipeline.quantize.device import resolve_device
    from quantmint.pipeline.serving.host.detect import local_device
    from quantmint.pipeline.serving.reference.lm import ReferenceLM, load_tokenizer, prompt_logprobs
    from quantmint.pipeline.serving.reference.model import load, reference_version

    folder, device = Path(options.model), resolve_device(options.device)
    loaded = load(folder, device, trust_remote_code=options.trust_remote_code)
    if options.kv_cache_dtype == "fp8" and not loaded.kv_scales:
        raise UserError(f"{folder}: --kv-cache-dtype fp8, but the checkpoint has no scales for its cache.")
    tokenizer = load_tokenizer(folder, loaded, trust_remote_code=options.trust_remote_code)
    facts = {
        "version": reference_version(),
        "runtime": loaded.runtime,
        "device": asdict(local_device(device)),
        "kv_cache_dtype": loaded.kv_cache_dtype,
    }
    print(f"{loaded.runtime}, on {facts['device']}", file=sys.stderr, flush=True)  # noqa: T201
    session = Session(partial(ReferenceLM, loaded, tokenizer))

    def reply(what: str, given: Mapping[str, Any], tell: Tell) -> Any:
        if what == "facts":
            return facts
        if what == "prompt_logprobs":
            return prompt_logprobs(loaded, given["ids"], given["likeliest"])
        return session.reply(what, given, tell)

    answer_on(options.socket, reply)


if __name__ == "__main__":
    sys.exit(main())
