"""The pages of the documentation, and what a reader types from them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECONDS = 600  # for one block, on a machine that may have much else to do

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|needs): (?P<words>[^>]*?) -->\n\s*)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"(?:#|//) ([\w-]+\.\w+)$")
_PORT = re.compile("850[0-2]")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str  # why; "": it is run
    needs: str  # a program, without which it is not run

    @property
    def file(self) -> str:
        """The file that the block is, by its first line; "": none."""
        found = _FILE.match(self.text.partition("\n")[0])
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            str(page.relative_to(ROOT)),
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            found["words"] if found["mark"] == "not run" else "",
            found["words"] if found["mark"] == "needs" else "",
        )
        for found in _BLOCK.finditer(text)
    ]


class Reader:
    """Somebody who saves the files of a page and types its commands as written, in a folder of his own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONWARNINGS": "ignore",
            **environment,
        }
        with contextlib.ExitStack() as held:  # other tests may hold the ports that the pages name
            taken = [held.enter_context(socket.socket()) for _ in range(3)]
            for one in taken:
                one.bind(("127.0.0.1", 0))
            self._ports = dict(
                zip(("8500", "8501", "8502"), (one.getsockname()[1] for one in taken), strict=True)
            )

    def save(self, block: Block) -> None:
        text = self._with_own_ports(block.text)
        if block.language == "yaml":
            grpc, http, metrics = self._ports.values()
            own = {
                "serve": {"grpc_port": grpc, "http_port": http, "metrics_port": metrics},
                "studio": {"enabled": False},
                "tracking": {"enabled": False},
            }
            assert not own.keys() & yaml.safe_load(text).keys()
            text += yaml.safe_dump(own)
        (self.folder / block.file).write_text(text)

    def type(self, block: Block) -> str:
        """What it prints."""
        return self.run(self._with_own_ports(block.text), str(block))

    def run(self, script: str, where: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{where}\n{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _with_own_ports(self, text: str) -> str:
        return _PORT.sub(lambda port: str(self._ports[port[0]]), text)
