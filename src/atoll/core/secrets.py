"""What no log, record or message may show: passwords in URLs, tokens, variables named like one."""

from __future__ import annotations

import hashlib
import re

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+@")
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # of a URL; a user alone is no secret
_SECRET_NAME = re.compile(
    r"(?:.*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)|PGPASS|(?:.*_)?(?:PAT|PASS))S?(?:_?\d+)?", re.I
)
# What providers' tokens begin with, whatever the variable is called.
_TOKEN = re.compile(
    r"(?:gh[opsu]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|AKIA|AIza|eyJ|npm_|pypi-|https://hooks\.slack\.com/)[\w./+=-]{12,}"
)
_PARTS = re.compile(r"[^\s\-_.:,;@/|\"'{}()\[\]]+")
_WORD = re.compile(r"(?=.{1,24}$)(?:(?:[A-Z]+|[A-Z]?[a-z]+(?:[A-Z][a-z]{2,})*)\d{0,4}|\d+[A-Za-z]{0,3})")
_PATH = re.compile(r"(?:~|\.{0,2})(?:/[\w.@ -]+)+/?")
_SHORTEST_SECRET = 8


def redact(text: str) -> str:
    """``text`` with user and password of every URL in it replaced by ``****``."""
    return _CREDENTIALS.sub("****@", text)


def digest_credentials(text: str) -> str:
    """``text`` with user and password of every URL in it as a digest, which still tells two apart."""
    return _CREDENTIALS.sub(lambda found: f"{_digest(found[0])}@", text)


def is_secret(name: str, value: str = "") -> bool:
    """Is this variable one that no record shows: by its name (``HF_TOKEN``), as a token, as a URL with a password?"""
    return any((_SECRET_NAME.fullmatch(name), _TOKEN.fullmatch(value), _PASSWORD.search(value)))


def secret_parts(name: str, value: str) -> set[str]:
    """What logs hide of a variable that nobody declared a secret: nothing where its value is made of ordinary words.

    ``DEPLOY_KEY=production`` hides nothing, ``DEPLOY_KEY=x7Kq9…`` its value, a URL with a password both.
    """
    if (found := _PASSWORD.search(value)) is not None:
        password = found[0][3:-1].partition(":")[2]
        return {value, password} if _looks_generated(password) else {value}
    if _TOKEN.fullmatch(value) or (_SECRET_NAME.fullmatch(name) and _looks_generated(value)):
        return {value}
    return set()


def _looks_generated(value: str) -> bool:
    """Has this text the length and the variety of a key? Words, numbers, names of models and paths have not."""
    if len(value) < _SHORTEST_SECRET or _PATH.fullmatch(value):
        return False
    odd = "".join(part for part in _PARTS.findall(value) if not _WORD.fullmatch(part))
    return len(odd) >= 6 and len(set(odd)) >= 5


def shown_variable(name: str, value: str) -> str:
    """A variable's value for messages and lists; a secret's digest, which still tells two apart."""
    return _digest(value) if is_secret(name, value) else value


def _digest(secret: str) -> str:
    return f"<secret {hashlib.sha256(secret.encode()).hexdigest()[:8]}>"
