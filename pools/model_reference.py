"""How a model file is named: by the catalogue, a hub's repository, a URL or a path. Pure."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

MAX_REFERENCE_CHARS = 600  # it is a key of rows
MAX_FILE_NAME_BYTES = 200  # partial files and locks get longer ones
_REPOSITORY = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_HUB = re.compile(
    rf"hf:(?P<repo>{_REPOSITORY})(?:/(?P<file>[^@:]+\.gguf)|:(?P<quant>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
HUB_HOST = "huggingface.co"
_HUB_PAGE = re.compile(rf"/(?P<repo>{_REPOSITORY})/(?:resolve|blob)/(?P<revision>[\w.-]+)/(?P<file>[^@:]+\.gguf)")
_NAME = re.compile(r"(?P<name>[\w.-]+?)(?::(?P<quant>[\w.-]+))?")


class ReferenceInvalid(ValueError):
    """The text names no model file; the message says how they are named."""


@dataclass(frozen=True)
class HubReference:
    """`hf:owner/repository/file.gguf`, or `hf:owner/repository:QUANT` for the one file of that quant; `@revision` may follow."""

    repo: str
    file: str = ""
    quant: str = ""
    revision: str = "main"

    def __str__(self) -> str:
        part = f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        return f"hf:{self.repo}{part}" + ("" if self.revision == "main" else f"@{self.revision}")


@dataclass(frozen=True)
class UrlReference:
    """A file behind http:// or https://."""

    url: str

    @property
    def file_name(self) -> str:
        return PurePosixPath(unquote(urlsplit(self.url).path)).name

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class PathReference:
    """A file that is here already and stays where it lies."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class NameReference:
    """A model of the catalogue; without a quant, the entry's first."""

    name: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.quant}" if self.quant else self.name


Reference = HubReference | UrlReference | PathReference | NameReference


def parse_reference(text: str) -> Reference:
    """What the text names. Raises ReferenceInvalid.

    A path has a slash or ends in .gguf; everything else without a scheme is a name of the catalogue.
    """
    text = text.strip()
    if not text or len(text) > MAX_REFERENCE_CHARS or not text.isprintable():
        raise ReferenceInvalid("give a name of the catalogue, hf:owner/repository/file.gguf, a URL or a path")
    if text.startswith("hf:"):
        return parse_hub(text)
    if re.match(r"https?://", text):
        return _url(text)
    if "/" in text or text.endswith(".gguf"):
        return PathReference(text)
    match = _NAME.fullmatch(text)
    if match is None:
        raise ReferenceInvalid(f"{text!r} is no name of the catalogue")
    return NameReference(match["name"], match["quant"] or "")


def parse_hub(text: str) -> HubReference:
    """A reference that begins with hf:. Raises ReferenceInvalid."""
    match = _HUB.fullmatch(text)
    if match is None or not (is_plain_path(match["file"] or "x") and is_plain_path(match["revision"] or "x")):
        raise ReferenceInvalid(
            f"{text!r} is not of the form hf:owner/repository/file.gguf or hf:owner/repository:QUANT"
        )
    return HubReference(match["repo"], match["file"] or "", match["quant"] or "", match["revision"] or "main")


def is_plain_path(path: str) -> bool:
    """Whether a hub's name of a file leads to a place below the folder that it is put under, on every kind of machine."""
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and all(part not in ("", ".", "..") and len(part.encode()) <= MAX_FILE_NAME_BYTES for part in parts)
    )


def without_query(text: str) -> str:
    """A reference as pages and messages show it: what follows a URL's path may be a signature that opens the file."""
    return text.partition("?")[0] + "?…" if re.match(r"https?://", text) and "?" in text else text


def _url(text: str) -> UrlReference | HubReference:
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        named = False
    if named and (parts.username is not None or parts.password is not None):
        # It would stand in rows and on pages.
        raise ReferenceInvalid("a URL must not carry a user or a password")
    reference = UrlReference(text)
    if named and parts.hostname == HUB_HOST and (page := _HUB_PAGE.fullmatch(unquote(parts.path))):
        # What a browser shows of a file: the hub tells its digest only by the other way.
        return parse_hub(f"hf:{page['repo']}/{page['file']}@{page['revision']}")
    if not named or not reference.file_name.endswith(".gguf") or not is_plain_path(reference.file_name):
        raise ReferenceInvalid(f"{text!r} is no URL of a .gguf file")
    return reference
