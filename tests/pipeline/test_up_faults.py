"""`up` after a signal, a crash or an error at an exact moment. The stages are test doubles."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from up_home import Home, eventually

from clickline.config import load_config

INTERRUPTED = "interrupted; run the same command again to resume\n"


def reached(home: Home, name: str) -> int:
    """The pid of the child that has come to this point."""
    file = home.folder / f"at-{name}"
    return int(eventually(lambda: file.exists() and file.read_text()))


def hold(home: Home, *names: str) -> None:
    for name in names:
        (home.folder / f"hold-{name}").touch()


def release(home: Home, name: str) -> None:
    (home.folder / f"hold-{name}").unlink()


def fault(home: Home, name: str, message_text: str) -> None:
    (home.folder / f"fault-{name}").write_text(message_text)


# ── the flow ───────────────────────────────────────────────────────────────────────────────────


def test_up_without_serving_ends_after_publish(home: Home) -> None:
    code, out, err = home.run("up", "--no-serve")
    assert code == 0
    assert out.splitlines()[:3] == ["model    ads", "version  7", "AUC      0.7000"]
    lines = err.splitlines()
    assert "prepare: skipped, up to date: 80 training rows, 20 evaluation rows" in lines
    assert "evaluate: done, AUC 0.7000, log loss 0.5000, calibration 1.0000" in lines
    assert home.state["state"] == "done"
    assert home.state["processes"] == []


@pytest.mark.slow
def test_ctrl_c_drains_the_endpoint_and_exits_zero(home: Home) -> None:
    process = home.start("up", "--json")
    home.until_up(process)
    hold(home, "drain")
    process.send_signal(signal.SIGINT)
    reached(home, "drain")
    assert process.poll() is None
    release(home, "drain")
    assert process.wait(10) == 0
    out, err = home.output(process)
    assert '"version": 7' in out and '"grpc": "127.0.0.1:' in out
    assert "stopping: waiting for running requests to finish" in err
    assert home.none_left(1)
    assert home.state["state"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_the_endpoint_is_up_exits_130(home: Home, number: signal.Signals) -> None:
    hold(home, "train")
    process = home.start("up")
    reached(home, "train")
    process.send_signal(number)
    assert process.wait(10) == 130
    assert home.output(process)[1].endswith(INTERRUPTED)
    assert home.none_left(1)
    assert (home.state["state"], home.stage("train")) == ("stopped", "stopped")


@pytest.mark.slow
def test_second_signal_does_not_drain(home: Home) -> None:
    hold(home, "drain")
    process = home.start("up")
    home.until_up(process)
    process.send_signal(signal.SIGINT)
    reached(home, "drain")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert home.none_left(1)


@pytest.mark.slow
def test_work_that_does_not_stop_is_killed(home: Home) -> None:
    """A stopped process, like one deep in a kernel, only reacts to SIGKILL."""
    hold(home, "train")
    process = home.start("up")
    os.kill(reached(home, "train"), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert home.none_left(1)


def test_killed_training_error_explains_how_to_resume(home: Home) -> None:
    hold(home, "train")
    process = home.start("up")
    os.kill(reached(home, "train"), signal.SIGKILL)
    assert process.wait(10) == 1
    last = home.output(process)[1].splitlines()[-1]
    assert last == (
        "train ended by signal 9 (SIGKILL), perhaps because memory ran out. Run the same command again to resume. "
        f"Log: {home.up}/logs/train.log."
    )
    assert (home.state["state"], home.stage("train")) == ("failed", "failed")
    code, out, _ = home.run("status")
    assert code == 1
    assert out.startswith("ads: failed in stage train at ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message_text", "code", "message"),
    [
        ("GateRefused not good enough", 3, "not good enough"),
        ("TooManyBadRows half of them", 4, "half of them"),
        ("OSError", 1, "/full: No space left on device"),
        ("Bug oops", 1, "this is a bug in Clickline: RuntimeError: ZeroDivisionError: oops"),
    ],
)
def test_errors_of_the_work_are_raised_by_the_command(
    home: Home, message_text: str, code: int, message: str
) -> None:
    fault(home, "train", message_text)
    found, _, err = home.run("up")
    assert found == code
    assert err.splitlines()[-1].startswith(message)
    assert home.none_left(1)


@pytest.mark.slow
def test_endpoint_that_never_started_is_an_error(home: Home) -> None:
    fault(home, "serve", "ClicklineError the port is taken")
    code, _, err = home.run("up")
    assert (code, err.splitlines()[-1]) == (1, "the port is taken")


def test_endpoint_that_dies_is_restarted(home: Home) -> None:
    process = home.start("up")
    home.until_up(process)
    first = home.pid("serve")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: home.is_up() and home.pid("serve") != first)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert "the endpoint ended by signal 9 (SIGKILL)" in home.output(process)[1]


@pytest.mark.slow
def test_status_shows_the_version_that_the_endpoint_switched_to(home: Home) -> None:
    process = home.start("up")
    home.until_up(process)
    (home.folder / "version").write_text("8")
    eventually(lambda: home.state["stages"]["serve"]["facts"]["version"] == 8)
    assert re.search(r"serve +running +version 8, gRPC ", home.run("status")[1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


@pytest.mark.parametrize("moment", ["prepare", "publish", "serve"])
def test_killed_parent_leaves_no_process(home: Home, moment: str) -> None:
    hold(home, moment)
    process = home.start("up")
    reached(home, moment)
    home.note_processes()
    process.kill()
    process.wait()
    assert home.none_left(3)


@pytest.mark.parametrize("role", ["flow", "serve"])
def test_child_exits_with_a_parent_that_left_messages_unread(home: Home, role: str) -> None:
    """Its socket is then reset instead of closed."""
    hold(home, "prepare")
    config = load_config(home.file).model_dump(mode="json", by_alias=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "clickline.pipeline.child_process", role, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=home.environment,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            ours.sendall(json.dumps({"config": config, "backfill": None}).encode() + b"\n")
            ours.settimeout(20)
            assert ours.recv(1, socket.MSG_PEEK)  # it has sent a message
            ours.close()
            child.wait(20)
        finally:
            child.kill()
            child.wait()
    assert child.returncode in (0, 1)


@pytest.mark.slow
def test_killed_parent_is_detected_and_the_next_run_resumes(home: Home) -> None:
    hold(home, "train")
    process = home.start("up")
    reached(home, "train")
    eventually(lambda: home.stage("train") == "running")
    home.note_processes()
    process.kill()
    process.wait()
    assert home.none_left(3)
    code, out, _ = home.run("status")
    assert code == 1
    assert out.startswith("ads: crashed in stage train (or the machine rebooted), last update ")
    assert "`clickline up` resumes it." in out
    release(home, "train")
    assert home.run("up", "--no-serve", "-q")[0] == 0


def killed_while_draining(home: Home) -> None:
    """Kill the parent while its endpoint drains a request."""
    process = home.start("up")
    home.until_up(process)
    hold(home, "drain")
    process.kill()
    process.wait()
    reached(home, "drain")


@pytest.mark.slow
def test_down_waits_for_processes_of_a_killed_parent(home: Home) -> None:
    killed_while_draining(home)
    code, out, _ = home.run("status")
    assert code == 1
    assert "1 of its processes are still exiting." in out
    down = home.start("down")
    eventually(lambda: "still running: serve (pid " in home.output(down)[1])
    release(home, "drain")
    assert down.wait(10) == 0
    assert home.output(down)[0] == "stopped 1 process\n"
    assert home.none_left(1)


@pytest.mark.slow
def test_next_up_waits_for_processes_of_a_killed_parent(home: Home) -> None:
    killed_while_draining(home)
    again = home.start("up")
    eventually(
        lambda: "an earlier run was killed; waiting for its processes to exit" in home.output(again)[1]
    )
    (home.folder / "at-prepare").unlink()
    release(home, "drain")
    reached(home, "prepare")
    eventually(lambda: home.state["pid"] == again.pid)
    home.until_up(again)
    again.send_signal(signal.SIGINT)
    assert again.wait(10) == 0


@pytest.mark.slow
def test_down_kills_processes_that_do_not_stop(home: Home) -> None:
    """Parent and endpoint are stopped: they react to no signal."""
    process = home.start("up")
    home.until_up(process)
    for pid in (home.pid("serve"), process.pid):
        os.kill(pid, signal.SIGSTOP)
    code, out, err = home.run("down")
    assert code == 0
    assert f"up (pid {process.pid}) did not stop in time and was killed" in err
    assert out == "stopped 2 processes\n"
    assert home.none_left(1)


# ── following ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_crashed_training_is_restarted_while_the_endpoint_serves(home: Home) -> None:
    hold(home, "follow")
    process = home.start("up", "--follow", "--backfill", "20260101..20260102/05")
    home.until_up(process)
    endpoint = home.pid("serve")
    for number in (signal.SIGKILL, signal.SIGSEGV):
        training = reached(home, "follow")
        (home.folder / "at-follow").unlink()
        os.kill(training, number)
    assert reached(home, "follow") != training
    assert home.pid("serve") == endpoint
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    err = home.output(process)[1]
    assert "training ended by signal 9 (SIGKILL), perhaps because memory ran out; restarting in 0.5 s" in err
    assert "training ended by signal 11 (SIGSEGV); restarting in 1 s" in err
    assert "backfill of 30 hours" in err


@pytest.mark.slow
def test_error_of_follow_ends_the_run(home: Home) -> None:
    hold(home, "follow")
    process = home.start("up", "--follow")
    home.until_up(process)
    training = reached(home, "follow")
    fault(home, "follow", "HourNotReady hour 7 never came")
    os.kill(training, signal.SIGKILL)
    assert process.wait(15) == 4
    assert home.output(process)[1].splitlines()[-1] == "hour 7 never came"


@pytest.mark.slow
def test_follow_without_an_endpoint_runs_until_stopped(home: Home) -> None:
    process = home.start("up", "--follow", "--no-serve", "-q")
    eventually(lambda: "hour 3" in home.output(process)[1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert "serve" not in home.state["stages"]


# ── bad arguments ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["up", "--backfill", "yesterday", "--follow"],
            "--backfill is 'yesterday'. Write FROM..TO, each a day",
        ),
        (
            ["up", "--backfill", "20260102..20260101", "--follow"],
            "--backfill is '20260102..20260101': from is 20260102, after dates.to 20260101. Write FROM..TO",
        ),
        (
            ["up", "--backfill", "20260101..20260102/24", "--follow"],
            "--backfill is '20260101..20260102/24': to is",
        ),
        (["up", "--backfill", "20260101..20260102"], "--backfill is given without --follow."),
        (["up", "--wait"], "--wait is given without --detach."),
        (["up", "--set", "home=s3://bucket/ads"], "clickline.yaml home is s3://bucket/ads."),
        (["logs", "trian"], "STAGE is 'trian'. Available logs: none yet. Allowed: up, prepare, train,"),
    ],
)
def test_invalid_arguments_are_named_with_allowed_values(
    home: Home, arguments: list[str], message: str
) -> None:
    code, out, err = home.run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)


@pytest.mark.slow
def test_commands_before_any_run(home: Home) -> None:
    code, out, _ = home.run("status")
    assert (code, out.splitlines()[0]) == (
        0,
        f"nothing has run in {home.up.parent} yet: start with `clickline up`",
    )
    code, out, _ = home.run("down")
    assert (code, out) == (0, f"nothing is running for {home.up.parent}\n")
    code, out, err = home.run("logs")
    assert (code, out, err) == (
        0,
        "",
        f"nothing has run in {home.up.parent} yet: start with `clickline up`\n",
    )
