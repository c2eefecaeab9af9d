"""What may be in a release: by its name, by what is really in it, and without tokens, keys and passwords.

>>> refused(["config.json", "model.safetensors", "optimizer.pt", "quantmint/gate.json"])
('optimizer.pt: a pickle, or may hold one, which runs code when it is loaded',)

A list of what may go out, not of what may not: a file that nobody thought of stays here. Names that are refused for a
reason which people should know come with that reason.

A finding of a credential says where and of which kind, never what. The forms are those of detect-secrets, read from its
detectors and never verified, as its verification sends what it found to whoever would accept it; ours for what it does
not know; and the values of this process's own credentials. Left out are its detectors of high entropy, of a word beside
a digest and of capital letters, because a release is full of digests and words.
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
from quantmint.pipeline.publish.release import CARD, EVIDENCE, MANIFEST, NOTICE, PROVENANCE, RECIPE, SBOM, SIGNATURE
from quantmint.pipeline.quantize.digest import NAMED_TEMPLATES
from quantmint.pipeline.quantize.formats.checkpoint import read_header
from quantmint.pipeline.recipe.load import PROVEN_SUITE
from quantmint.pipeline.store.files import require_safe

SCORES: Final = ".eval_results"
"""Folder of a release that the Hub reads scores from."""
ATTRIBUTES: Final = ".gitattributes"
"""What the Hub itself adds to a repository: it says which files it keeps outside git."""

# The first that fits any part of a name gives the reason; what fits none must still be of a kind that is allowed.
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
            rf"{_CHECKPOINT}|{re.escape(SCORES)}/[^/]+\.ya?ml",
            *(re.escape(name) for name in (CARD, MANIFEST, SIGNATURE, ATTRIBUTES, RECIPE, PROVENANCE, SBOM, NOTICE)),
            rf"{EVIDENCE}/([^/]+/)*[^/]+\.(json|json\.gz|jsonl\.gz|html|md|xml)",
            rf"{PROVEN_SUITE}/([^/]+/)*[^/]+\.(ya?ml|jsonl?|csv|parquet|txt)",
        )
    )
)
_CODE: Final = re.compile(r"[^/]+\.py")  # as the Hub's clients look for it: at the top, nowhere else
_MAGIC: Final = (
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle"),
    (re.compile(rb"PK(\x03\x04|\x05\x06)"), "a zip archive, which is how `torch.save` writes a pickle"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive"),
    (re.compile(rb"\x89HDF"), "HDF5"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"), "a compressed file"),
    (re.compile(rb"\x7fELF|MZ.\x00|#!"), "a program"),
)
_HEAD = 512  # bytes; as far as the last of them looks


def refused_names(names: Iterable[str], *, with_code: bool = False) -> tuple[str, ...]:
    """A line for each name that must not go out: the name, and why. ``with_code`` lets Python files at the top pass."""
    names = list(names)
    try:
        require_safe(names)
    except ValueError as error:
        return (f"{error}",)
    found = ((name, _reason(name, with_code)) for name in names)
    return tuple(f"{name}: {reason}" for name, reason in found if reason is not None)


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
    """A line for each file that is not what its name says; ``files`` are paths by their names in the release.

    Weights are read as far as their header, JSON and text whole. A symbolic link is none of them.
    """
    found: dict[str, str | None] = {}
    for name, path in files.items():
        try:
            regular = not path.is_symlink() and stat.S_ISREG(path.stat().st_mode)
            found[name] = _content(name, path) if regular else "not a file"
        except (OSError, EOFError, zlib.error) as error:
            found[name] = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return tuple(f"{name}: {fault}" for name, fault in found.items() if fault is not None)


def _content(name: str, path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    magic = next((kind for pattern, kind in _MAGIC if pattern.match(head)), None)
    if name.endswith(".safetensors"):
        # Its first bytes are a length, which may look like anything: 640 is how a pickle begins.
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
"""Where a form is looked for. A vocabulary holds any word, so there only what cannot be one; a word such as "password:"
before a value proves something only in what is written for people."""

_SHORTEST = 8  # characters; a shorter value of a variable is a word that stands anywhere
_NAMES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|KEY|CREDENTIALS|PAT)(_|$)")
_WORD = re.compile(r"[A-Z]?[a-z]{0,15}|[A-Z]{0,16}|\d{0,11}")  # which no text can be kept free of
_EXAMPLES = re.compile(
    r"[<{$%*].*|(.)\1*|your[-_ ].*|(my|some|an?|the)[-_ ](api[-_ ]?)?(token|password|key|secret)"
    r"|.*(example|placeholder|redacted|changeme).*"
    r"|(pass(word|wd|phrase)?|pwd|secret|token|key|user|username|none|null|true|false)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Detector:
    """A kind of credential; ``places`` gives the start of each that a text holds."""

    kind: str
    scope: Scope
    places: Callable[[str], Iterator[int]]


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
# kind -> (scope, form); a group is a value that must not be an example's
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
    """Every detector; the values of ``environment`` (None: this process's) that are credentials are some of them."""
    from detect_secrets.plugins.jwt import JwtTokenDetector
    from detect_secrets.plugins.keyword import KeywordDetector

    library: list[Detector] = []
    for kind, (module, _, cls) in ((kind, name.partition(".")) for kind, name in _KNOWN.items()):
        forms = getattr(import_module(f"detect_secrets.plugins.{module}"), cls).denylist
        library.append(Detector(kind, "everything", _matching(*forms, example=False)))
    own = (Detector(kind, scope, _matching(re.compile(form))) for kind, (scope, form) in _OWN.items())
    token = Detector("JSON web token", "texts", _matching(_TOKEN, valid=JwtTokenDetector.is_formally_valid))
    word = Detector("password or key by its name", "prose", _by_keyword(KeywordDetector()))
    return (*library, *own, token, word, *_own_values(environment))


def _exactly(kind: str, value: str) -> Detector:
    """A detector of one value, as it stands or as JSON or HTML writes it."""
    # A text is read byte by byte: see `_text`.
    forms = {text.encode().decode("latin-1") for text in (value, json.dumps(value)[1:-1], html.escape(value))}
    pattern = re.compile("|".join(map(re.escape, sorted(forms))))
    return Detector(kind, "everything", lambda text: (match.start() for match in pattern.finditer(text)))


def _own_values(environment: Mapping[str, str] | None) -> Iterator[Detector]:
    from huggingface_hub import get_token

    found = dict(os.environ if environment is None else environment)
    stored = get_token() if environment is None else None
    values = {value: f"the value of {name}" for name, value in sorted(found.items()) if _NAMES.search(name.upper())}
    if stored is not None:
        values.setdefault(stored, "the Hub's token of this machine")
    for value, kind in values.items():
        # What names a file that holds the secret is none itself.
        is_path = "/" in value and os.path.exists(value)  # noqa: PTH110 - a value may be too long for a path
        if len(value) >= _SHORTEST and not is_path and not _WORD.fullmatch(value):
            yield _exactly(kind, value)


def _matching(
    *forms: re.Pattern[str], valid: Callable[[str], bool] = lambda _: True, example: bool = True
) -> Callable[[str], Iterator[int]]:
    """Where a form stands by itself, not in the middle of a digest or a picture, and is no example (``example``)."""

    def places(text: str) -> Iterator[int]:
        for match in (match for form in forms for match in form.finditer(text)):
            value = next((group for group in match.groups() if group), None) if example else None
            alone = _is_edge(text, match.start() - 1, match.start()) and _is_edge(text, match.end(), match.end() - 1)
            if alone and valid(match.group()) and not (value is not None and _EXAMPLES.fullmatch(value)):
                yield match.start()

    return places


def _is_edge(text: str, outside: int, inside: int) -> bool:
    if not 0 <= outside < len(text) or not (_is_word(text[outside]) and _is_word(text[inside])):
        return True
    return outside < inside and text[outside - 1 : outside] == "\\"  # the n of a \n, as JSON writes the end of a line


def _is_word(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _by_keyword(detector: object) -> Callable[[str], Iterator[int]]:
    """Where a line gives a password or a key by its name; what is short, a number or an example is none."""
    analyze = detector.analyze_string  # type: ignore[attr-defined]

    def places(text: str) -> Iterator[int]:
        from detect_secrets.plugins.keyword import REGEX_BY_FILETYPE
        from detect_secrets.util.filetype import FileType

        start = 0
        for line in text.splitlines(keepends=True):
            values = analyze(line.rstrip(), denylist_regex_to_group=REGEX_BY_FILETYPE[FileType.YAML])
            if any(_VALUE.fullmatch(value) and not _EXAMPLES.fullmatch(value) for value in values):
                yield start
            start += len(line)

    return places


_HEADER = 100_000_000  # bytes of the longest header that safetensors reads
_VOCABULARY = re.compile(
    r"(tokenizer|vocab|added_tokens|special_tokens_map|merges).*\.(json|txt)|.*\.(model|tiktoken|safetensors)"
)
_PROSE = re.compile(r".*\.(ya?ml|md)")


@dataclass(frozen=True, slots=True, order=True)
class Secret:
    """Where something stands that others must not read, and of which kind it is; never what."""

    file: str
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}"


def find_secrets(files: Mapping[str, Path], environment: Mapping[str, str] | None = None) -> tuple[Secret, ...]:
    """The credentials in these files, by their names in the release; each line and kind once.

    Of weights the header is read, which has room for any text; what is compressed is searched as it would be unpacked.
    ``environment`` has variables whose values are looked for too (None: this process's, and the Hub's stored token).
    Raises `StageError` for a file that cannot be read.
    """
    known = detectors(environment)
    found: set[Secret] = set()
    for name, path in files.items():
        try:
            text = _text(name, path)
        except (OSError, EOFError, zlib.error) as error:
            raise StageError(f"{path} cannot be searched for secrets: {error}") from error
        base, wanted = name.rpartition("/")[2], ["everything"]
        if base == "tokenizer_config.json" or not _VOCABULARY.fullmatch(base):
            wanted += ["texts", "prose"] if _PROSE.fullmatch(base) else ["texts"]
        for detector in known:
            if detector.scope in wanted:
                found |= {Secret(name, text.count("\n", 0, at) + 1, detector.kind) for at in detector.places(text)}
    return tuple(sorted(found))


def _text(name: str, path: Path) -> str:
    """What a file says, a character a byte, so that no bytes are refused: of weights the header."""
    if name.endswith(".gz"):
        raw = gzip.decompress(path.read_bytes())
    elif name.endswith(".safetensors"):
        with path.open("rb") as file:
            raw = file.read(min(int.from_bytes(file.read(8), "little"), _HEADER))
    else:
        raw = path.read_bytes()
    return raw.decode("latin-1")
