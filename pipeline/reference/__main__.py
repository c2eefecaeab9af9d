"""Serve one checkpoint on the loopback interface until the process is ended."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.errors import QuantmintError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, listen, answer; returns an exit code where that did not come about."""
    options = _parser().parse_args(arguments)
    try:
        _serve(options)
    except QuantmintError as error:
        hint = f"\n{error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)  # noqa: T201 - this is a program
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _serve(options: argparse.Namespace) -> None:
    from pipeline.device import resolve_device
    from pipeline.reference.batches import Batches
    from pipeline.reference.greedy import answer
    from pipeline.reference.model import load
    from pipeline.reference.service import HttpServer, Service
    from pipeline.reference.text import Text
    from pipeline.reference.words import reference_version
    from pipeline.serving.host.detect import device_here

    if not ipaddress.ip_address(options.host).is_loopback:
        raise UserError(
            f"--host: found {options.host}, expected an address of the loopback interface, as 127.0.0.1: there is no "
            "key, and no limit to what may be asked."
        )
    folder, device = Path(options.model), resolve_device(options.device)
    loaded = load(folder, device, trust_remote_code=options.trust_remote_code)
    if options.kv_cache_dtype == "fp8" and not loaded.kv_scales:
        raise UserError(f"{folder}: --kv-cache-dtype fp8, but the checkpoint has no scales for its cache.")
    config = loaded.model.config
    text = Text.of(folder, config, trust_remote_code=options.trust_remote_code)
    inner = config.get_text_config()
    facts = {
        "version": reference_version(),
        "runtime": loaded.runtime,
        "device": device_here(device).to_json(),
        "kv_cache_dtype": loaded.kv_cache_dtype,
    }
    longest = getattr(inner, "max_position_embeddings", None)
    service = Service(
        model_name=options.served_model_name or options.model,
        root=options.model,
        max_model_len=options.max_model_len or longest or 2048,
        vocabulary=inner.vocab_size,
        facts=facts,
        text=text,
        batches=Batches(partial(answer, loaded, stop_string=text.stop_string), inner.vocab_size),
    )
    try:
        server = HttpServer(options.host, options.port, service)
    except OSError as error:
        raise UserError(f"{options.host}:{options.port}: cannot listen: {error}.") from None
    print(f"{loaded.runtime}, on {facts['device']}, at {options.host}:{options.port}", flush=True)  # noqa: T201
    with server:
        server.serve_forever()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.reference",
        description="Answer completions through transformers, computed as the checkpoint's format means it.",
    )
    add = parser.add_argument
    add("model", help="folder of a checkpoint")
    add("--port", type=int, default=8000)
    add("--host", default="127.0.0.1", help="an address of the loopback interface (default: %(default)s)")
    add("--served-model-name", help="what requests call it (default: the folder)")
    add("--max-model-len", type=int, help="tokens of a prompt with its answer (default: the model's)")
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8: refuse a checkpoint without scales for its cache (default: what the checkpoint says)",
    )
    add("--device", default="auto", help="PyTorch's name of a device (default: a GPU where there is one)")
    add("--trust-remote-code", action="store_true", help="run Python code of the model's folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
