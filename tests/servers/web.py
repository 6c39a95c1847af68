"""A web server that counts: files in memory, ETags, Range, folder pages, and a stop in the middle of an answer."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from servers.serving import QuietHandler, served


@dataclass
class Web:
    """What the server offers, how it behaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)  # by path: "/logs/a.tsv"
    ranges: bool = True
    etags: bool = True
    lists_folders: bool = False
    password: str | None = None  # asked for as "Authorization: Bearer <password>"
    status: int | None = None  # answer everything with it
    stop_after: int | None = None  # send so many bytes of a body, then wait for `go_on`
    cut_after: int | None = None  # send so many bytes of a body, then close the connection
    stopped: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    gets: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    url: str = ""


@contextmanager
def web_server() -> Iterator[Web]:
    web = Web()

    class Handler(QuietHandler):
        def do_HEAD(self) -> None:
            self._serve()

        def do_GET(self) -> None:
            self._serve()

        def _serve(self) -> None:
            path = self.path.partition("?")[0]
            if web.status:
                return self.answer(web.status)
            if web.password and self.headers.get("Authorization") != f"Bearer {web.password}":
                return self.answer(401)
            if path.endswith("/") and any(name.startswith(path) for name in web.files):
                return self._folder(path)
            if path not in web.files:
                return self.answer(404)
            if self.command == "GET":
                web.gets.append(self.path)
            return self._file(web.files[path])

        def _folder(self, path: str) -> None:
            names = {name[len(path) :].split("/")[0] for name in web.files if name.startswith(path)}
            folders = {name.split("/")[0] for name in names if f"{path}{name}" not in web.files}
            links = "".join(f'<a href="{n}{"/" * (n in folders)}">{n}</a>' for n in sorted(names))
            page = (
                f'<html><a href="?C=N;O=D">Name</a>{links}</html>'
                if web.lists_folders
                else "<html>hello</html>"
            )
            self.answer(200, page.encode(), Content_Type="text/html")

        def _file(self, content: bytes) -> None:
            asked = (
                re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "") if web.ranges else None
            )
            first = int(asked[1]) if asked else 0
            last = int(asked[2]) + 1 if asked and asked[2] else len(content)
            body = content[first:last]
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(body)))
            if web.etags:
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            if web.stop_after is not None:
                self._send(body[: web.stop_after])
                body = body[web.stop_after :]
                web.stopped.set()
                web.go_on.wait(60)
            if web.cut_after is not None:
                self._send(body[: web.cut_after])
                self.close_connection = True
                return
            self._send(body)

        def _send(self, body: bytes) -> None:
            self.wfile.write(body)
            self.wfile.flush()
            web.bytes_sent += len(body)

    with served(Handler) as port:
        web.url = f"http://127.0.0.1:{port}"
        try:
            yield web
        finally:
            web.go_on.set()
