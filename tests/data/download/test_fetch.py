"""Downloads, from a server on this machine that breaks off, lies, and changes its mind."""

import base64
import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading

import pytest

from coterie.core.errors import CoterieWarning, DataError
from coterie.data.download import fetch
from coterie.data.download.fetch import DownloadRoute, Remote, debian, download, get, npm

DATA = bytes(range(256)) * 1000


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends `server.data`, but at most `server.most` bytes at a time; with ranges unless `server.whole`."""

    def do_GET(self):
        self.server.asked.append(self.headers.get("Range"))
        if self.path == "/none":
            self.send_error(404)
            return
        data, start = self.server.data, 0
        asked = self.headers.get("Range")
        if asked and not self.server.whole:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : start + self.server.most])

    def log_message(self, *words):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.data, made.most, made.whole, made.asked = DATA, 10**9, False, []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def remote(server, path="/file", data=DATA, file="file"):
    return Remote(f"http://127.0.0.1:{server.server_port}{path}", file, "md5", hashlib.md5(data).hexdigest())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_download(server, tmp_path):
    seen = []
    download(remote(server), tmp_path / "file", lambda here, total: seen.append((here, total)))
    assert (tmp_path / "file").read_bytes() == DATA
    assert names(tmp_path) == ["file"]
    assert seen[-1] == (len(DATA), len(DATA))


def test_a_broken_connection_is_taken_up_where_it_broke(server, tmp_path):
    server.most = len(DATA) // 3 + 1
    download(remote(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    assert server.asked == [None, f"bytes={server.most}-", f"bytes={2 * server.most}-"]


def test_a_download_that_was_stopped_goes_on_the_next_time(server, tmp_path):
    server.most = len(DATA) // 20
    with pytest.raises(DataError, match=r"cannot be downloaded: .*run the same command again to continue"):
        download(remote(server), tmp_path / "file")
    assert names(tmp_path) == ["file.part"]
    have = (tmp_path / "file.part").stat().st_size
    assert have == fetch.MAX_ATTEMPTS * server.most
    server.most = 10**9
    download(remote(server), tmp_path / "file")
    assert server.asked[-1] == f"bytes={have}-"
    assert (tmp_path / "file").read_bytes() == DATA
    assert names(tmp_path) == ["file"]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    (tmp_path / "file.part").write_bytes(DATA[:100])
    server.whole = True
    download(remote(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_rest_of_something_else_is_thrown_away(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * 100)
    download(remote(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    (tmp_path / "file").unlink()
    (tmp_path / "file.part").write_bytes(b"x" * (len(DATA) + 5))
    download(remote(server), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    with pytest.raises(DataError, match="is not the published file: its MD5 is not"):
        download(remote(server, data=b"other"), tmp_path / "file")
    assert names(tmp_path) == []


def test_what_is_not_there(server, tmp_path):
    with pytest.raises(DataError, match="answers 404"):
        download(remote(server, "/none"), tmp_path / "file")
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match="cannot be downloaded"):
        download(remote(server), tmp_path / "file")
    with pytest.raises(DataError, match="not a web address"):
        download(Remote("file:///etc/hostname", "file", "md5", ""), tmp_path / "file")
    assert names(tmp_path) == []


def archive(**members):
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(f"../../package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return whole.getvalue()


def md5(data):
    return hashlib.md5(data).hexdigest()


def test_files_come_out_of_a_package_checked(server, tmp_path):
    server.data = archive(a=b"one", b=gzip.compress(b"two"), c=b"not asked for")
    there = remote(server, data=server.data, file="package.tgz")
    files = get(tmp_path / "set", [DownloadRoute(lambda: [there], None, {"a": md5(b"one")})])
    assert [path.read_bytes() for path in files] == [b"one"]
    assert names(tmp_path / "set") == ["a"]  # neither the package, nor what lay beside, nor anything outside
    assert names(tmp_path) == ["set"]
    with pytest.raises(DataError, match="a is not the published file"):
        get(tmp_path / "other", [DownloadRoute(lambda: [there], None, {"a": md5(b"two")})])
    assert names(tmp_path / "other") == ["package.tgz"]
    with pytest.raises(DataError, match="does not contain d"):
        get(tmp_path / "third", [DownloadRoute(lambda: [there], None, {"a": md5(b"one"), "d": md5(b"")})])


def test_gzipped_members_are_checked_by_what_is_inside(server, tmp_path):
    server.data = gzip.compress(b"two")
    there = remote(server, data=server.data, file="b.gz")
    get(tmp_path, [DownloadRoute(lambda: [there], None, {"b.gz": md5(b"two")})])
    assert names(tmp_path) == ["b.gz"]
    asked = len(server.asked)
    get(tmp_path, [DownloadRoute(lambda: [there])])  # is there already
    assert len(server.asked) == asked


def test_the_first_route_that_works_is_taken(server, tmp_path):
    gone = DownloadRoute(lambda: [remote(server, "/none")], origin="the first")
    with pytest.warns(CoterieWarning, match=r"answers 404 Not Found\. Trying the second next"):
        files = get(tmp_path, [gone, DownloadRoute(lambda: [remote(server)], origin="the second")])
    assert [path.read_bytes() for path in files] == [DATA]
    never = DownloadRoute(lambda: pytest.fail("not this"))
    assert get(tmp_path, [DownloadRoute(lambda: [remote(server)]), never]) == files


def test_a_file_with_a_wrong_checksum_is_replaced_by_the_next_route(server, tmp_path):
    wrong = DownloadRoute(lambda: [remote(server, data=b"other")])
    with pytest.warns(CoterieWarning, match="is not the published file"):
        get(tmp_path, [wrong, DownloadRoute(lambda: [remote(server)])])
    assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.filterwarnings("ignore::coterie.CoterieWarning")
def test_when_no_route_works_every_reason_is_given(server, tmp_path):
    missing_tool = DownloadRoute(lambda: pytest.fail("not this"), "no-such-tool", origin="the package p")
    with pytest.raises(DataError, match=r"^the package p needs no-such-tool, which is not installed$"):
        get(tmp_path, [missing_tool])
    with pytest.raises(
        DataError, match=r"any of its 2 sources:\n- the authors' site: .*404.*\n- the package p: .*tool"
    ):
        get(tmp_path, [DownloadRoute(lambda: [remote(server, "/none")]), missing_tool])


def test_a_folder_that_cannot_be_written_is_not_a_reason_for_another_route(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/set' cannot be written"):
        get(tmp_path / "file" / "set", [DownloadRoute(lambda: []), DownloadRoute(lambda: pytest.fail("not this"))])


def test_npm_and_apt_are_asked_where_their_packages_lie(monkeypatch):
    said = {}
    monkeypatch.setattr(fetch, "_run", lambda *command: said[command[0]])
    digest = hashlib.sha512(b"x")
    integrity = "sha512-" + base64.b64encode(digest.digest()).decode()
    said["npm"] = json.dumps({"tarball": "https://example.org/p.tgz", "integrity": integrity}).encode()
    assert npm("p@1.0.0") == [Remote("https://example.org/p.tgz", "p-1.0.0.tgz", "sha512", digest.hexdigest())]
    said["apt-get"] = b"'http://example.org/p_1_all.deb' p_1_all.deb 12 SHA256:abc\n"
    assert debian("p") == [Remote("http://example.org/p_1_all.deb", "p.deb", "sha256", "abc")]
    for words in (b"{}", b"", b"null"):
        said["npm"] = words
        with pytest.raises(DataError, match="npm does not give a URL and checksum for the package p"):
            npm("p")
    said["apt-get"] = b""
    with pytest.raises(DataError, match="apt-get update"):
        debian("p")


def test_a_tool_that_fails_is_quoted():
    with pytest.raises(DataError, match="'false' failed"):
        fetch._run("false")
    with pytest.raises(DataError, match="failed"):
        fetch._run("no-such-tool-at-all")
