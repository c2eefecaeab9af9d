"""Screening of a release's files: allowed names, contents that match the names, and no tokens, keys or passwords.

>>> refused_names(["config.json", "model.safetensors", "optimizer.pt", "quantmint/gate.json"])
('optimizer.pt: a pickle, or may hold one, which runs code when it is loaded',)

The names are an allow list: an unforeseen file is not published. Known dangerous names are refused with their reason.

A found credential is reported with its place and kind, never with its value. The patterns are those of detect-secrets,
our own for kinds that it does not know, and the values of this process's own credentials. Its online verification is
never used: it sends a credential to the service. Its detectors of high entropy, of a word beside a digest and of
capital letters are left out, because a release is full of digests and words.
"""

from __future__ import annotations

import gzip
import html
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Literal

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish.release import (
    CARD,
    DRAFT,
    EVIDENCE,
    MANIFEST,
    NOTICE,
    PROVENANCE,
    RECIPE,
    SBOM,
    SIGNATURE,
)
from quantmint.pipeline.quantize.digest import NAMED_TEMPLATES
from quantmint.pipeline.quantize.formats.checkpoint import read_header
from quantmint.pipeline.recipe.load import PROVEN_SUITE
from quantmint.pipeline.store.files import require_safe

SCORES: Final = ".eval_results"
"""Folder of a release from which the Hub reads scores."""
ATTRIBUTES: Final = ".gitattributes"
"""The Hub's own file in a repository, with the patterns of the files outside git."""

# The first match with any part of a name gives the reason; a name without a match must still match _ALLOWED.
_REASONS: Final = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (
            r".*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|dill|npy|npz|h5|hdf5|keras|msgpack|mar|nemo|tar|zip)",
            "a pickle, or may hold one, which runs code when it is loaded",
        ),
        (r".*\.py", "code that readers would have to trust; the recipe does not say `trust_remote_code`"),
        (
            r"\.env.*|\.netrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519).*|.*\.(pem|key|p12|pfx|jks|kdbx?|gpg|asc|token)"
            r"|(client_)?(credentials?|secrets?|passwords?|token|service[-_]account)(\.\w+)?|kubeconfig.*",
            "may hold a key, a token or a password",
        ),
        (r"\..*", "a hidden file"),
    )
)
_LICENCES = r"(LICEN[SC]E|NOTICE|Notice|USE_POLICY)[A-Za-z0-9 ._-]*"
_CHECKPOINT = (
    rf"[^/]+\.(safetensors|json|txt|model|jinja|tiktoken)|{NAMED_TEMPLATES}/[^/]+\.jinja|recipe\.yaml|{_LICENCES}"
)
_ALLOWED: Final = re.compile(
    "|".join(
        (
            rf"({DRAFT}/)?({_CHECKPOINT})|{re.escape(SCORES)}/[^/]+\.ya?ml",
            *(re.escape(name) for name in (CARD, MANIFEST, SIGNATURE, ATTRIBUTES, RECIPE, PROVENANCE, SBOM, NOTICE)),
            rf"{EVIDENCE}/([^/]+/)*[^/]+\.(json|json\.gz|jsonl\.gz|html|md|xml)",
            rf"{PROVEN_SUITE}/([^/]+/)*[^/]+\.(ya?ml|jsonl?|csv|parquet|txt)",
        )
    )
)
_CODE: Final = re.compile(r"[^/]+\.py")  # the Hub's clients look for code at the top alone
_MAGIC: Final = (
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle"),
    (re.compile(rb"PK(\x03\x04|\x05\x06)"), "a zip archive, which is how `torch.save` writes a pickle"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive"),
    (re.compile(rb"\x89HDF"), "HDF5"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"), "a compressed file"),
    (re.compile(rb"\x7fELF|MZ.\x00|#!"), "a program"),
)
_HEAD = 512  # bytes; enough for the tar magic


def refused_names(names: Iterable[str], *, with_code: bool = False) -> tuple[str, ...]:
    """Return a line with name and reason for each refused name; ``with_code`` allows Python files at the top."""
    names = list(names)
    try:
        require_safe(names)
    except ValueError as error:
        return (f"{error}",)
    reasons = ((name, _reason(name, with_code)) for name in names)
    return tuple(f"{name}: {reason}" for name, reason in reasons if reason is not None)


def _reason(name: str, with_code: bool) -> str | None:
    if with_code and _CODE.fullmatch(name):
        return None
    parts = name.split("/")
    for part in parts[1:] if name == ATTRIBUTES or parts[0] == SCORES else parts:
        for pattern, reason in _REASONS:
            if pattern.fullmatch(part.casefold()):
                return reason
    return None if _ALLOWED.fullmatch(name) else "not a kind of file that a release holds"


def misnamed_files(files: Mapping[str, Path]) -> tuple[str, ...]:
    """Return a line with name and reason for each file whose content does not match its name.

    ``files`` are paths by their names in the release. Of weights only the header is read. Symbolic links are refused.
    """
    faults: dict[str, str | None] = {}
    for name, path in files.items():
        try:
            regular = not path.is_symlink() and stat.S_ISREG(path.stat().st_mode)
            faults[name] = _content(name, path) if regular else "not a file"
        except (OSError, EOFError, zlib.error) as error:
            faults[name] = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return tuple(f"{name}: {fault}" for name, fault in faults.items() if fault is not None)


def _content(name: str, path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    magic = next((kind for pattern, kind in _MAGIC if pattern.match(head)), None)
    if name.endswith(".safetensors"):
        # The first bytes are a length, which may look like any magic: 640 looks like a pickle.
        try:
            read_header(path)
        except UserError as error:
            return f"{magic}, no safetensors" if magic else error.message.removeprefix(f"{path}: ").rstrip(".")
        return None
    if name.endswith(".gz"):
        with gzip.open(path) as packed:
            return None if packed.read(1) in (b"{", b"[") else "something else in it, expected JSON"
    if magic is not None and not (name.endswith(".py") and head.startswith(b"#!")):
        return magic
    if name.endswith((".json", ".sig")):
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
    elif not name.endswith(".model") and b"\x00" in path.read_bytes():
        return "no text: it has zero bytes"
    return None


Scope = Literal["everything", "texts", "prose"]
"""The files that a detector searches. A vocabulary has any word, so only unmistakable patterns are searched there; a
keyword such as "password:" before a value means something only in prose."""

_SHORTEST = 8  # characters; a shorter value of a variable may occur anywhere
_NAMES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|KEY|CREDENTIALS|PAT)(_|$)")
_WORD = re.compile(
    r"[A-Z]?[a-z]{0,15}|[A-Z]{0,16}|\d{0,11}"
)  # ordinary words and short numbers, which occur in any text
_EXAMPLES = re.compile(
    r"[<{$%*].*|(.)\1*|your[-_ ].*|(my|some|an?|the)[-_ ](api[-_ ]?)?(token|password|key|secret)"
    r"|.*(example|placeholder|redacted|changeme).*"
    r"|(pass(word|wd|phrase)?|pwd|secret|token|key|user|username|none|null|true|false)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Detector:
    """A kind of credential; ``starts`` yields the start of each occurrence in a text."""

    kind: str
    scope: Scope
    starts: Callable[[str], Iterator[int]]


# kind -> module and class in detect-secrets
_KNOWN: Final[Mapping[str, str]] = {
    "AWS key": "aws.AWSKeyDetector",
    "Azure storage key": "azure_storage_key.AzureStorageKeyDetector",
    "Discord token": "discord.DiscordBotTokenDetector",
    "GitHub token": "github_token.GitHubTokenDetector",
    "GitLab token": "gitlab_token.GitLabTokenDetector",
    "Mailchimp key": "mailchimp.MailchimpDetector",
    "OpenAI key": "openai.OpenAIDetector",
    "PyPI token": "pypi_token.PypiTokenDetector",
    "SendGrid key": "sendgrid.SendGridDetector",
    "Slack token": "slack.SlackDetector",
    "Square secret": "square_oauth.SquareOAuthDetector",
    "Stripe key": "stripe.StripeDetector",
    "Telegram token": "telegram_token.TelegramBotTokenDetector",
    "Twilio key": "twilio.TwilioKeyDetector",
}
# kind -> (scope, pattern); a group matches the value, which must not be an example
_OWN: Final[Mapping[str, tuple[Scope, str]]] = {
    "Hugging Face token": ("everything", r"(?:hf|api_org)_[A-Za-z0-9]{30,}|hf_(?:oauth|jwt)_[A-Za-z0-9._-]{20,900}"),
    "private key": ("everything", r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY"),
    "GitHub fine-grained token": ("everything", r"github_pat_[A-Za-z0-9_]{60,}"),
    "npm token": ("everything", r"npm_[A-Za-z0-9]{36}"),
    "Google key": ("everything", r"AIza[A-Za-z0-9_-]{35}"),
    "Anthropic key": ("everything", r"sk-ant-[A-Za-z0-9_-]{32,}"),
    "Databricks token": ("everything", r"dapi[0-9a-f]{32}(?:-\d+)?"),
    "signed address": ("texts", r"(?i)x-amz-signature=[0-9a-f]{64}"),
    "W&B key": (
        "everything",
        r"(?i)wandb_v\d_[A-Za-z0-9_]{40,}|wandb[_-]?(?:api[_-]?)?key\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?[0-9a-f]{40}",
    ),
    "MLflow credentials": (
        "texts",
        r"(?i)mlflow_tracking_(?:password|token)\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?([^\s\"'\\,<]{4,900})",
    ),
    "Authorization header": (
        "texts",
        r"(?i)authorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:bearer|basic|token)\s{1,3}([A-Za-z0-9._~+/=-]{8,900})"
        r"|\bbearer\s{1,3}((?=[A-Za-z._~+/=-]{0,40}\d)[A-Za-z0-9._~+/=-]{20,900})",
    ),
    "password in an address": (
        "texts",
        r"://[^\s:/?#\[\]@\"'\\<>]{1,200}:([^\s:/?#\[\]@\"'\\<>]{3,200})@(?=[A-Za-z0-9\[])",
    ),
}
_TOKEN = re.compile(r"eyJ[A-Za-z0-9_-]{8,600}\.[A-Za-z0-9_-]{8,900}(?:\.[A-Za-z0-9_-]{0,900})?")
_VALUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z]{2})\S{8,}")


def detectors(environment: Mapping[str, str] | None = None) -> tuple[Detector, ...]:
    """Return all detectors, also for credentials in ``environment`` (None: this process's)."""
    from detect_secrets.plugins.jwt import JwtTokenDetector
    from detect_secrets.plugins.keyword import KeywordDetector

    library: list[Detector] = []
    for kind, (module, _, cls) in ((kind, name.partition(".")) for kind, name in _KNOWN.items()):
        forms = getattr(import_module(f"detect_secrets.plugins.{module}"), cls).denylist
        library.append(Detector(kind, "everything", _matching(*forms, example=False)))
    ours = (Detector(kind, scope, _matching(re.compile(form))) for kind, (scope, form) in _OWN.items())
    token = Detector("JSON web token", "texts", _matching(_TOKEN, valid=JwtTokenDetector.is_formally_valid))
    word = Detector("password or key by its name", "prose", _by_keyword(KeywordDetector()))
    return (*library, *ours, token, word, *_own_values(environment))


def _exactly(kind: str, value: str) -> Detector:
    """Return a detector of one value, plain or escaped for JSON or HTML."""
    # `_text` decodes each byte as a character.
    forms = {text.encode().decode("latin-1") for text in (value, json.dumps(value)[1:-1], html.escape(value))}
    pattern = re.compile("|".join(map(re.escape, sorted(forms))))
    return Detector(kind, "everything", lambda text: (match.start() for match in pattern.finditer(text)))


def _own_values(environment: Mapping[str, str] | None) -> Iterator[Detector]:
    from huggingface_hub import get_token

    variables = dict(os.environ if environment is None else environment)
    stored = get_token() if environment is None else None
    values = {value: f"the value of {name}" for name, value in sorted(variables.items()) if _NAMES.search(name.upper())}
    if stored is not None:
        values.setdefault(stored, "the Hub's token of this machine")
    for value, kind in values.items():
        # The path of a file with a secret is no secret.
        is_path = "/" in value and os.path.exists(value)  # noqa: PTH110 - a value may be too long for a path
        if len(value) >= _SHORTEST and not is_path and not _WORD.fullmatch(value):
            yield _exactly(kind, value)


def _matching(
    *forms: re.Pattern[str], valid: Callable[[str], bool] = lambda _: True, example: bool = True
) -> Callable[[str], Iterator[int]]:
    """Return a function that yields the starts of matches outside longer words; ``example`` leaves out examples."""

    def starts(text: str) -> Iterator[int]:
        for match in (match for form in forms for match in form.finditer(text)):
            value = next((group for group in match.groups() if group), None) if example else None
            alone = _is_edge(text, match.start() - 1, match.start()) and _is_edge(text, match.end(), match.end() - 1)
            if alone and valid(match.group()) and not (value is not None and _EXAMPLES.fullmatch(value)):
                yield match.start()

    return starts


def _is_edge(text: str, outside: int, inside: int) -> bool:
    if not 0 <= outside < len(text) or not (_is_word(text[outside]) and _is_word(text[inside])):
        return True
    return outside < inside and text[outside - 1 : outside] == "\\"  # the n of a \n, as JSON writes the end of a line


def _is_word(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _by_keyword(detector: object) -> Callable[[str], Iterator[int]]:
    """Return a function that yields the starts of lines with a named password or key, but no example or number."""
    analyze = detector.analyze_string  # type: ignore[attr-defined]

    def starts(text: str) -> Iterator[int]:
        from detect_secrets.plugins.keyword import REGEX_BY_FILETYPE
        from detect_secrets.util.filetype import FileType

        start = 0
        for line in text.splitlines(keepends=True):
            values = analyze(line.rstrip(), denylist_regex_to_group=REGEX_BY_FILETYPE[FileType.YAML])
            if any(_VALUE.fullmatch(value) and not _EXAMPLES.fullmatch(value) for value in values):
                yield start
            start += len(line)

    return starts


_HEADER = 100_000_000  # bytes; safetensors reads no longer header
_VOCABULARY = re.compile(
    r"(tokenizer|vocab|added_tokens|special_tokens_map|merges).*\.(json|txt)|.*\.(model|tiktoken|safetensors)"
)
_PROSE = re.compile(r".*\.(ya?ml|md)")


@dataclass(frozen=True, slots=True, order=True)
class Secret:
    """The place and kind of a credential in a file, without its value."""

    file: str
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}"


def find_secrets(files: Mapping[str, Path], environment: Mapping[str, str] | None = None) -> tuple[Secret, ...]:
    """Return the credentials in the files, given by their names in the release; each line and kind once.

    Of weights only the header is searched, which may have any text; compressed files are unpacked. The values of
    credentials in ``environment`` are searched too (None: this process's, and the Hub's stored token). Raises
    `StageError` for a file that cannot be read.
    """
    all_detectors = detectors(environment)
    secrets: set[Secret] = set()
    for name, path in files.items():
        try:
            text = _text(name, path)
        except (OSError, EOFError, zlib.error) as error:
            raise StageError(f"{path} cannot be searched for secrets: {error}") from error
        base, scopes = name.rpartition("/")[2], ["everything"]
        if base == "tokenizer_config.json" or not _VOCABULARY.fullmatch(base):
            scopes += ["texts", "prose"] if _PROSE.fullmatch(base) else ["texts"]
        for detector in all_detectors:
            if detector.scope in scopes:
                secrets |= {Secret(name, text.count("\n", 0, at) + 1, detector.kind) for at in detector.starts(text)}
    return tuple(sorted(secrets))


def _text(name: str, path: Path) -> str:
    """Return a file's text (of weights the header) in Latin-1, which decodes any byte to one character."""
    if name.endswith(".gz"):
        raw = gzip.decompress(path.read_bytes())
    elif name.endswith(".safetensors"):
        with path.open("rb") as file:
            raw = file.read(min(int.from_bytes(file.read(8), "little"), _HEADER))
    else:
        raw = path.read_bytes()
    return raw.decode("latin-1")
