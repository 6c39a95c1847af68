"""`up --detach`, `status`, `logs` and `down` as a user types them, and the terminal output. Stages are test doubles."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
from contextlib import suppress

import pytest
from up_home import SCRIPT, Home, eventually


def detached(home: Home, *arguments: str) -> int:
    """The pid of a run in the background."""
    code, out, err = home.run("up", "--detach", "--json", *arguments)
    assert code == 0, err
    document = json.loads(out)
    assert document["logs"] == str(home.up / "logs")
    return int(document["pid"])


@pytest.mark.slow
def test_detached_run_status_and_down(home: Home) -> None:
    code, out, err = home.run("up", "--detach")
    assert (code, err) == (0, "")
    pid = int(re.match(r"pid +(\d+)\n", out)[1])  # type: ignore[index]
    assert "stop       clickline down\n" in out
    eventually(home.is_up)
    following = home.start("logs", "-f", "-n", "1")

    code, out, _ = home.run("status")
    assert code == 0
    assert re.match(rf"ads: running since \d{{4}}-.* UTC \(.* ago\), pid {pid}\n", out)
    assert re.search(r"prepare +skipped +up to date: 80 training rows", out)
    assert re.search(r"serve +running +version 7, gRPC 127.0.0.1:\d+", out)
    assert "health     no answer: Connection refused" in out  # a double opens no port
    assert f"processes  up {pid}, serve {home.pid('serve')}\n" in out

    code, out, err = home.run("up")
    assert (code, out) == (1, "")
    assert re.match(
        rf"`clickline up` is running for .* since .* UTC \(.* ago\), pid {pid}, stage serve\.", err
    )
    assert "`clickline status`" in err and "`clickline down`" in err
    assert json.loads(home.run("up", "--detach", "--json")[1])["error"]["kind"] == "ClicklineError"

    code, out, _ = home.run("down", "--json")
    document = json.loads(out)
    assert (code, document["killed"]) == (0, [])
    assert {(one["role"], one["pid"]) for one in document["ended"]} >= {("up", pid)}
    assert home.none_left(1)
    assert following.wait(10) == 0
    assert "ended: stopped" in home.output(following)[0]
    code, out, _ = home.run("status")
    assert code == 0
    assert out.startswith("ads: stopped in stage serve at ")


@pytest.mark.slow
def test_detached_run_outlives_its_starter_and_reports_its_failure(home: Home) -> None:
    (home.folder / "hold-train").touch()
    (home.folder / "fault-publish").write_text("ArtifactError it is torn")
    pid = detached(home)
    assert home.state["pid"] == pid
    (home.folder / "hold-train").unlink()
    eventually(lambda: home.state["state"] == "failed")
    assert home.none_left()
    code, out, _ = home.run("status", "--json")
    document = json.loads(out)
    assert (code, document["state"], document["stage"]) == (1, "failed", "publish")
    assert document["error"] == {"kind": "ArtifactError", "message": "it is torn"}
    assert document["versions"]["count"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("GateRefused too bad", 3), ("SourceNotFound too bad", 4)])
def test_detach_wait_returns_the_error_and_its_exit_code(home: Home, fault: str, code: int) -> None:
    (home.folder / "fault-train").write_text(fault)
    found, _, err = home.run("up", "--detach", "--wait")
    assert found == code
    assert err.splitlines()[-1] == "too bad"
    assert "prepare: done" in err or "prepare: skipped" in err


@pytest.mark.slow
def test_detach_wait_without_an_endpoint(home: Home) -> None:
    code, out, _ = home.run("up", "--detach", "--wait", "--no-serve", "--json")
    assert (code, json.loads(out)["state"]) == (0, "done")


def test_logs_of_all_stages_or_of_one(home: Home) -> None:
    (home.folder / "hold-train").touch()
    process = home.start("up", "--no-serve", "-q")
    log = home.up / "logs" / "train.log"
    eventually(lambda: log.exists() and "printed in train" in log.read_text())
    (home.folder / "hold-train").unlink()
    assert process.wait(20) == 0
    lines = home.run("logs")[1].splitlines()
    stamps = [line.split()[0] for line in lines]
    assert stamps == sorted(stamps)
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$", stamp) for stamp in stamps)
    assert [line.split()[1] for line in lines][:1] == ["up"]
    code, out, _ = home.run("logs", "train", "-n", "4")
    assert code == 0
    texts = [line.partition(" ")[2] for line in out.splitlines()]
    assert len(texts) == 4
    assert "printed in train" in texts and "train all: started, 100 rows" in texts
    code, _, err = home.run("logs", "trian")
    assert code == 2
    assert err.startswith("STAGE is 'trian'. Available logs: up, prepare, train, evaluate, gate, publish.")


def test_state_has_the_progress_of_the_work(home: Home) -> None:
    (home.folder / "hold-train").touch()
    process = home.start("up", "-q")
    work = eventually(lambda: home.stage("train") == "running" and home.state["work"])
    assert (work["title"], work["rows"], work["share"], work["note"]) == ("train all", 50, 0.5, "half")
    assert re.search(r"train all: 50 rows, [\d,]+ rows/s, half, 50%, about .* left", home.run("status")[1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 130


# ── on a terminal ──────────────────────────────────────────────────────────────────────────────


class Screen:
    """A command on its own terminal, for the duration of a block."""

    def __init__(self, home: Home, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**home.environment, "TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [SCRIPT, *arguments], cwd=home.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.raw = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while piece := os.read(self._ours, 4096):
                self.raw += piece.decode(errors="replace")

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", self.raw).replace("\r\n", "\n").replace("\r", "\n")

    def interrupt(self) -> int:
        """Send Ctrl-C; returns the exit code after all output was read."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(20)
        self._reader.join(10)
        return code

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._ours)


@pytest.mark.slow
def test_terminal_shows_stages_then_the_endpoint(home: Home) -> None:
    (home.folder / "hold-train").touch()
    with Screen(home, "up") as screen:
        eventually(lambda: "train all: 50 rows" in screen.text and re.search(r"● train +\d", screen.text))
        home.note_processes()
        (home.folder / "hold-train").unlink()
        eventually(lambda: "try it:" in screen.text)
        home.note_processes()
        assert screen.interrupt() == 0
        assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")  # the cursor is back
    lines = [line.rstrip() for line in screen.text.splitlines()]
    assert "= prepare  up to date: 80 training rows, 20 evaluation rows" in lines
    assert any(re.match(r"  ━+.* train all: 50 rows, [\d,]+ rows/s, half, 50%", line) for line in lines)
    assert "✓ evaluate AUC 0.7000, log loss 0.5000, calibration 1.0000" in lines
    last = lines[max(n for n, line in enumerate(lines) if line.startswith("= prepare")) :]
    marks = ["= prepare", "✓ train", "✓ evaluate", "✓ gate", "✓ publish", "● serve"]
    assert [line[:10].rstrip() for line in last[:6]] == marks
    assert any(line.startswith("  curl http://127.0.0.1:") for line in last)


@pytest.mark.slow
def test_log_lines_scroll_above_the_stages(home: Home) -> None:
    with Screen(home, "up", "--follow") as screen:
        eventually(lambda: "hour 5" in screen.text and "try it:" in screen.text)
        home.note_processes()
        assert screen.interrupt() == 0
    assert "hour 3\n" in screen.text
    assert "  curl http://127.0.0.1:" in screen.text
    assert re.search(r"● follow   training 20260101/\d\d", screen.text)


@pytest.mark.slow
def test_status_watch_ends_with_ctrl_c(home: Home) -> None:
    home.run("up", "--no-serve", "-q")
    with Screen(home, "status", "--watch") as screen:
        eventually(lambda: screen.text.count("ads: done at ") >= 2)
        assert screen.interrupt() == 130
