"""A name node and its data node that speak WebHDFS over HTTP, with the tree in memory.

The protocol as Hadoop documents it: reads and writes are redirected to the data node, errors are a RemoteException in
JSON, RENAME onto an existing file answers {"boolean": false} with status 200 unless renameoptions=OVERWRITE is given.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit

from servers.serving import QuietHandler, served

_API = "/webhdfs/v1"
_DATA = "/data-node"


@dataclass
class NameNode:
    files: dict[str, bytes] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"/"})
    changed: dict[str, int] = field(default_factory=dict)  # modification time in ms
    overwrites: bool = True  # False: a gateway that does not know renameoptions
    failing_reads: bool = False  # the data node answers OPEN with an error page
    forbidden: str | None = None  # below this path nothing may be touched
    operations: list[str] = field(default_factory=list)
    held: str | None = None  # an operation that waits for `go_on`
    holding: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    address: str = ""  # host:port
    _clock: count[int] = field(default_factory=lambda: count(1_700_000_000_000))

    @property
    def uri(self) -> str:
        return f"webhdfs://{self.address}"

    def write(self, path: str, content: bytes) -> None:
        self.files[path] = content
        self.changed[path] = next(self._clock)
        self.add_folder(path.rpartition("/")[0])

    def add_folder(self, path: str) -> None:
        while path:
            self.folders.add(path)
            path = path.rpartition("/")[0]

    def status(self, path: str) -> dict[str, object]:
        is_file = path in self.files
        return {
            "pathSuffix": "",
            "type": "FILE" if is_file else "DIRECTORY",
            "length": len(self.files.get(path, b"")),
            "modificationTime": self.changed.get(path, 0),
            "accessTime": 0,
            "blockSize": 134217728,
            "replication": 1,
            "owner": "hdfs",
            "group": "supergroup",
            "permission": "644",
        }

    def children(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        below = (name for name in (*self.files, *self.folders) if name.startswith(prefix) and name != prefix)
        return sorted({prefix + name[len(prefix) :].split("/")[0] for name in below})


@contextmanager
def webhdfs_server() -> Iterator[NameNode]:
    node = NameNode()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._dispatch()

        do_PUT = do_POST = do_DELETE = do_GET

        def _dispatch(self) -> None:
            address = urlsplit(self.path)
            self.query = {name: values[0] for name, values in parse_qs(address.query).items()}
            body = self.body()
            operation = self.query.get("op", "")
            at_data_node = address.path.startswith(_DATA)
            path = unquote(address.path.removeprefix(_DATA).removeprefix(_API)) or "/"
            if not at_data_node:
                node.operations.append(operation)
                if operation == node.held:
                    node.holding.set()
                    node.go_on.wait(60)
            if node.forbidden and path.startswith(node.forbidden):
                return self._refuse(403, "AccessControlException", f"Permission denied: {path}")
            handle = getattr(self, f"_{operation.lower()}", None)
            if handle is None:
                return self._refuse(400, "UnsupportedOperationException", f"op={operation}")
            if operation in ("OPEN", "CREATE", "APPEND") and not at_data_node:
                if operation == "OPEN" and path not in node.files:
                    return self._missing(path)
                return self.answer(307, Location=f"http://{node.address}{_DATA}{self.path}")
            return handle(path, body)

        def _json(self, tree: object) -> None:
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")

        def _refuse(self, status: int, exception: str, message: str) -> None:
            problem = {"RemoteException": {"exception": exception, "message": message}}
            self.answer(status, json.dumps(problem).encode(), Content_Type="application/json")

        def _missing(self, path: str) -> None:
            self._refuse(404, "FileNotFoundException", f"File does not exist: {path}")

        def _getfilestatus(self, path: str, _: bytes) -> None:
            known = path in node.files or path.rstrip("/") in {*node.folders, ""}
            self._json({"FileStatus": node.status(path)}) if known else self._missing(path)

        def _liststatus(self, path: str, _: bytes) -> None:
            if path in node.files:
                return self._json({"FileStatuses": {"FileStatus": [node.status(path)]}})
            if path.rstrip("/") not in {*node.folders, ""}:
                return self._missing(path)
            statuses = [{**node.status(c), "pathSuffix": c.rsplit("/", 1)[1]} for c in node.children(path)]
            return self._json({"FileStatuses": {"FileStatus": statuses}})

        def _open(self, path: str, _: bytes) -> None:
            if node.failing_reads:
                return self.answer(500, b"<html>Internal error of the data node</html>")
            first = int(self.query.get("offset", 0))
            length = int(self.query.get("length", len(node.files[path])))
            return self.answer(200, node.files[path][first : first + length])

        def _create(self, path: str, body: bytes) -> None:
            node.write(path, body)
            self.answer(201)

        def _append(self, path: str, body: bytes) -> None:
            node.write(path, node.files[path] + body)
            self.answer(200)

        def _mkdirs(self, path: str, _: bytes) -> None:
            node.add_folder(path)
            self._json({"boolean": True})

        def _rename(self, path: str, _: bytes) -> None:
            target = self.query["destination"]
            overwrite = node.overwrites and self.query.get("renameoptions") == "OVERWRITE"
            if path not in node.files or (target in node.files and not overwrite):
                return self._json({"boolean": False})
            node.write(target, node.files.pop(path))
            return self.answer(200) if overwrite else self._json({"boolean": True})

        def _delete(self, path: str, _: bytes) -> None:
            doomed = [name for name in node.files if name == path or name.startswith(path + "/")]
            for name in doomed:
                del node.files[name]
            node.folders -= {name for name in node.folders if name == path or name.startswith(path + "/")}
            self._json({"boolean": bool(doomed)})

    with served(Handler) as port:
        node.address = f"127.0.0.1:{port}"
        try:
            yield node
        finally:
            node.go_on.set()
