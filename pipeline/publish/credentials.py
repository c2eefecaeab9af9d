"""What a credential looks like, and where that form proves something.

The forms are those of detect-secrets, read from its detectors and never verified: its verification sends what it found
to whoever would accept it. Beside them stand forms that it does not know. Left out are its detectors of high entropy,
of a word beside a digest (IBM, SoftLayer, Cloudant) and of capital letters (Artifactory), because a release is full of
digests and of words; and npm's, whose time grows with the square of a line.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Scope = Literal["everything", "texts", "prose"]
"""Where a form is looked for. A vocabulary holds any word, so there only what cannot be one; a word such as "password:"
before a value proves something only in what is written for people."""

LONGEST: Final = 1024
"""Characters of the longest form; a longer value is known by its beginning."""
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
    """A kind of credential.

    ``anchors`` are lower-case literals, one of which is in whatever fits: a text without them need not be searched.
    ``places`` gives start and end of each that a text holds.
    """

    kind: str
    scope: Scope
    anchors: tuple[str, ...]
    places: Callable[[str], Iterator[tuple[int, int]]]


# kind -> (module and class in detect-secrets, anchors)
_KNOWN: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "AWS key": ("aws.AWSKeyDetector", ("a3t", "abia", "acca", "akia", "asia", "aws")),
    "Azure storage key": ("azure_storage_key.AzureStorageKeyDetector", ("accountkey=",)),
    "Discord token": ("discord.DiscordBotTokenDetector", (".",)),
    "GitHub token": ("github_token.GitHubTokenDetector", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    "GitLab token": (
        "gitlab_token.GitLabTokenDetector",
        (
            "glpat-",
            "gldt-",
            "glft-",
            "glsoat-",
            "glrt-",
            "gr1348941",
            "glcbt-",
            "glimt-",
            "glptt-",
            "glagent-",
            "gloas-",
        ),
    ),
    "Mailchimp key": ("mailchimp.MailchimpDetector", ("-us",)),
    "OpenAI key": ("openai.OpenAIDetector", ("t3blbkfj",)),
    "PyPI token": ("pypi_token.PypiTokenDetector", ("pypi-",)),
    "SendGrid key": ("sendgrid.SendGridDetector", ("sg.",)),
    "Slack token": ("slack.SlackDetector", ("xox", "hooks.slack.com")),
    "Square secret": ("square_oauth.SquareOAuthDetector", ("sq0csp-",)),
    "Stripe key": ("stripe.StripeDetector", ("k_live_",)),
    "Telegram token": ("telegram_token.TelegramBotTokenDetector", (":",)),
    "Twilio key": ("twilio.TwilioKeyDetector", ("ac", "sk")),
}
# kind -> (scope, anchors, form); a group is a value that must not be an example's
_OWN: Final[Mapping[str, tuple[Scope, tuple[str, ...], str]]] = {
    "Hugging Face token": (
        "everything",
        ("hf_", "api_org_"),
        r"(?:hf|api_org)_[A-Za-z0-9]{30,}|hf_(?:oauth|jwt)_[A-Za-z0-9._-]{20,900}",
    ),
    "private key": ("everything", ("private key",), r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY"),
    "GitHub fine-grained token": ("everything", ("github_pat_",), r"github_pat_[A-Za-z0-9_]{60,}"),
    "npm token": ("everything", ("npm_",), r"npm_[A-Za-z0-9]{36}"),
    "Google key": ("everything", ("aiza",), r"AIza[A-Za-z0-9_-]{35}"),
    "Anthropic key": ("everything", ("sk-ant-",), r"sk-ant-[A-Za-z0-9_-]{32,}"),
    "Databricks token": ("everything", ("dapi",), r"dapi[0-9a-f]{32}(?:-\d+)?"),
    "signed address": ("texts", ("x-amz-signature=",), r"(?i)x-amz-signature=[0-9a-f]{64}"),
    "W&B key": (
        "everything",
        ("wandb",),
        r"(?i)wandb_v\d_[A-Za-z0-9_]{40,}|wandb[_-]?(?:api[_-]?)?key\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?[0-9a-f]{40}",
    ),
    "MLflow credentials": (
        "texts",
        ("mlflow_tracking_",),
        r"(?i)mlflow_tracking_(?:password|token)\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?([^\s\"'\\,<]{4,900})",
    ),
    "Authorization header": (
        "texts",
        ("authorization", "bearer"),
        r"(?i)authorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:bearer|basic|token)\s{1,3}([A-Za-z0-9._~+/=-]{8,900})"
        r"|\bbearer\s{1,3}((?=[A-Za-z._~+/=-]{0,40}\d)[A-Za-z0-9._~+/=-]{20,900})",
    ),
    "password in an address": (
        "texts",
        ("://",),
        r"://[^\s:/?#\[\]@\"'\\<>]{1,200}:([^\s:/?#\[\]@\"'\\<>]{3,200})@(?=[A-Za-z0-9\[])",
    ),
}
_TOKEN = re.compile(r"eyJ[A-Za-z0-9_-]{8,600}\.[A-Za-z0-9_-]{8,900}(?:\.[A-Za-z0-9_-]{0,900})?")
_WEB_TOKEN = "JSON web token"  # noqa: S105 - a kind
_VALUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z]{2})\S{8,}")
_KEYWORD = "password or key by its name"


def detectors(environment: Mapping[str, str] | None = None) -> tuple[Detector, ...]:
    """Every detector; the values of ``environment`` (None: this process's) that are credentials are some of them."""
    from detect_secrets.plugins.jwt import JwtTokenDetector
    from detect_secrets.plugins.keyword import KeywordDetector

    own = (Detector(kind, scope, anchors, _matching(re.compile(form))) for kind, (scope, anchors, form) in _OWN.items())
    token = Detector(_WEB_TOKEN, "texts", ("eyj",), _matching(_TOKEN, valid=JwtTokenDetector.is_formally_valid))
    word = Detector(_KEYWORD, "prose", ("",), _by_keyword(KeywordDetector()))
    return (*_of_library(), *own, token, word, *_own_values(environment))


def exactly(kind: str, value: str) -> Detector:
    """A detector of one value, as it stands or as JSON or HTML writes it; known by its beginning where it is long."""
    # A text is read byte by byte: see `pipeline.publish.secrets`.
    forms = {text.encode()[:LONGEST].decode("latin-1") for text in (value, json.dumps(value)[1:-1], html.escape(value))}
    pattern = re.compile("|".join(re.escape(form) for form in sorted(forms)))
    return Detector(kind, "everything", tuple(form.lower() for form in forms), _anywhere(pattern))


def _of_library() -> Iterator[Detector]:
    from importlib import import_module

    for kind, (name, anchors) in _KNOWN.items():
        module, _, cls = name.partition(".")
        detector = getattr(import_module(f"detect_secrets.plugins.{module}"), cls)()
        yield Detector(kind, "everything", anchors, _matching(*detector.denylist, example=False))


def _own_values(environment: Mapping[str, str] | None) -> Iterator[Detector]:
    from huggingface_hub import get_token

    found = dict(os.environ if environment is None else environment)
    stored = get_token() if environment is None else None
    values = {value: f"the value of {name}" for name, value in sorted(found.items()) if _NAMES.search(name.upper())}
    if stored is not None:
        values.setdefault(stored, "the Hub's token of this machine")
    for value, kind in values.items():
        if len(value) >= _SHORTEST and not _is_path(value) and not _WORD.fullmatch(value):
            yield exactly(kind, value)


def _is_path(value: str) -> bool:
    """Whether it names a file that holds the secret: a path is none itself."""
    try:
        return "/" in value and Path(value).exists()
    except (OSError, ValueError):
        return False


def _matching(
    *forms: re.Pattern[str], valid: Callable[[str], bool] = lambda _: True, example: bool = True
) -> Callable[[str], Iterator[tuple[int, int]]]:
    """Where a form stands by itself, not in the middle of a digest or a picture, and is no example (``example``)."""

    def places(text: str) -> Iterator[tuple[int, int]]:
        for match in (match for form in forms for match in form.finditer(text)):
            value = next((group for group in match.groups() if group), None) if example else None
            alone = _is_edge(text, match.start() - 1, match.start()) and _is_edge(text, match.end(), match.end() - 1)
            if alone and valid(match.group()) and not (value is not None and _EXAMPLES.fullmatch(value)):
                yield match.span()

    return places


def _is_edge(text: str, outside: int, inside: int) -> bool:
    if not 0 <= outside < len(text) or not (_is_word(text[outside]) and _is_word(text[inside])):
        return True
    return outside < inside and text[outside - 1 : outside] == "\\"  # the n of a \n, as JSON writes the end of a line


def _is_word(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _anywhere(form: re.Pattern[str]) -> Callable[[str], Iterator[tuple[int, int]]]:
    return lambda text: (match.span() for match in form.finditer(text))


def _by_keyword(detector: object) -> Callable[[str], Iterator[tuple[int, int]]]:
    """Where a line gives a password or a key by its name; what is short, a number or an example is none."""
    analyze = detector.analyze_string  # type: ignore[attr-defined]

    def places(text: str) -> Iterator[tuple[int, int]]:
        from detect_secrets.plugins.keyword import REGEX_BY_FILETYPE
        from detect_secrets.util.filetype import FileType

        start = 0
        for line in text.splitlines(keepends=True):
            values = analyze(line.rstrip(), denylist_regex_to_group=REGEX_BY_FILETYPE[FileType.YAML])
            if any(_VALUE.fullmatch(value) and not _EXAMPLES.fullmatch(value) for value in values):
                yield start, start + len(line)
            start += len(line)

    return places
