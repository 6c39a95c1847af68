"""What `up` does when something ends: a signal, a crash, an error, at an exact moment. The stages are doubles."""

from __future__ import annotations

import json
import os
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


def let_go(home: Home, name: str) -> None:
    (home.folder / f"hold-{name}").unlink()


def fault(home: Home, name: str, words: str) -> None:
    (home.folder / f"fault-{name}").write_text(words)


# ── the flow ───────────────────────────────────────────────────────────────────────────────────


def test_without_serving_it_ends_after_publish(home: Home) -> None:
    code, out, err = home.run("up", "--no-serve")
    assert code == 0
    assert out.splitlines()[:3] == ["model    ads", "version  7", "AUC      0.7000"]
    lines = err.splitlines()
    assert "prepare: skipped, up to date: 80 rows to learn, 20 to measure" in lines
    assert "evaluate: done, AUC 0.7000, log loss 0.5000, calibration 1.0000" in lines
    assert home.state["state"] == "done"
    assert home.state["processes"] == []


@pytest.mark.slow
def test_the_endpoint_is_up_then_ctrl_c_drains_and_ends_well(home: Home) -> None:
    process = home.start("up", "--json")
    home.until_up(process)
    hold(home, "drain")
    process.send_signal(signal.SIGINT)
    reached(home, "drain")
    assert process.poll() is None
    let_go(home, "drain")
    assert process.wait(10) == 0
    out, err = home.said(process)
    assert '"version": 7' in out and '"grpc": "127.0.0.1:' in out
    assert "stopping: waiting for running requests to finish" in err
    assert home.none_left(1)
    assert home.state["state"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_flow_is_exit_130(home: Home, number: signal.Signals) -> None:
    hold(home, "train")
    process = home.start("up")
    reached(home, "train")
    process.send_signal(number)
    assert process.wait(10) == 130
    assert home.said(process)[1].endswith(INTERRUPTED)
    assert home.none_left(1)
    assert (home.state["state"], home.stage("train")) == ("stopped", "stopped")


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_endpoint(home: Home) -> None:
    hold(home, "drain")
    process = home.start("up")
    home.until_up(process)
    process.send_signal(signal.SIGINT)
    reached(home, "drain")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert home.none_left(1)


@pytest.mark.slow
def test_work_that_does_not_end_is_killed(home: Home) -> None:
    """As deep in a kernel: stopped, it hears no signal but one."""
    hold(home, "train")
    process = home.start("up")
    os.kill(reached(home, "train"), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert home.none_left(1)


def test_a_killed_learner_is_an_error_that_says_what_to_do(home: Home) -> None:
    hold(home, "train")
    process = home.start("up")
    os.kill(reached(home, "train"), signal.SIGKILL)
    assert process.wait(10) == 1
    last = home.said(process)[1].splitlines()[-1]
    assert last == (
        "train was ended by signal 9 (SIGKILL), perhaps because memory ran out. Run the same command again: it goes "
        f"on where it was. The log: {home.up}/logs/train.log."
    )
    assert (home.state["state"], home.stage("train")) == ("failed", "failed")
    code, out, _ = home.run("status")
    assert code == 1
    assert out.startswith("ads: failed in stage train at ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("GateRefused not good enough", 3, "not good enough"),
        ("TooManyBadRows half of them", 4, "half of them"),
        ("OSError", 1, "/full: No space left on device"),
        ("Bug oops", 1, "this is a bug in Clickline: RuntimeError: ZeroDivisionError: oops"),
    ],
)
def test_errors_of_the_work_are_those_of_the_command(home: Home, words: str, code: int, message: str) -> None:
    fault(home, "train", words)
    found, _, err = home.run("up")
    assert found == code
    assert err.splitlines()[-1].startswith(message)
    assert home.none_left(1)


@pytest.mark.slow
def test_an_endpoint_that_never_worked_is_an_error(home: Home) -> None:
    fault(home, "serve", "ClicklineError the port is taken")
    code, _, err = home.run("up")
    assert (code, err.splitlines()[-1]) == (1, "the port is taken")


def test_an_endpoint_that_dies_is_started_again(home: Home) -> None:
    process = home.start("up")
    home.until_up(process)
    first = home.pid("serve")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: home.is_up() and home.pid("serve") != first)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert "the endpoint ended by signal 9 (SIGKILL)" in home.said(process)[1]


@pytest.mark.parametrize("moment", ["prepare", "publish", "serve"])
def test_a_killed_parent_leaves_nobody_behind(home: Home, moment: str) -> None:
    hold(home, moment)
    process = home.start("up")
    reached(home, moment)
    home.note_processes()
    process.kill()
    process.wait()
    assert home.none_left(3)


@pytest.mark.parametrize("role", ["flow", "serve"])
def test_a_child_ends_with_a_parent_that_has_not_read_all_it_was_told(home: Home, role: str) -> None:
    """Its socket is then reset instead of ended."""
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
            assert ours.recv(1, socket.MSG_PEEK)  # it has told something
            ours.close()
            child.wait(20)
        finally:
            child.kill()
            child.wait()
    assert child.returncode in (0, 1)


@pytest.mark.slow
def test_a_killed_parent_is_recognised_and_the_next_goes_on(home: Home) -> None:
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
    assert out.startswith("ads: ended without a word (crash or reboot) in stage train, last heard of at ")
    assert "`clickline up` goes on where it was." in out
    let_go(home, "train")
    assert home.run("up", "--no-serve", "-q")[0] == 0


def killed_while_draining(home: Home) -> None:
    """The parent is gone, and its endpoint lets a request end."""
    process = home.start("up")
    home.until_up(process)
    hold(home, "drain")
    process.kill()
    process.wait()
    reached(home, "drain")


@pytest.mark.slow
def test_down_waits_for_what_a_killed_parent_has_left(home: Home) -> None:
    killed_while_draining(home)
    code, out, _ = home.run("status")
    assert code == 1
    assert "1 of its processes still run: they are about to end." in out
    down = home.start("down")
    eventually(lambda: "still running: serve (pid " in home.said(down)[1])
    let_go(home, "drain")
    assert down.wait(10) == 0
    assert home.said(down)[0] == f"ended: 1 process of {home.up.parent}, none is left\n"
    assert home.none_left(1)


@pytest.mark.slow
def test_the_next_up_waits_for_what_a_killed_parent_has_left(home: Home) -> None:
    killed_while_draining(home)
    again = home.start("up")
    eventually(lambda: "an earlier run was killed; its processes are about to end" in home.said(again)[1])
    (home.folder / "at-prepare").unlink()
    let_go(home, "drain")
    reached(home, "prepare")
    eventually(lambda: home.state["pid"] == again.pid)
    home.until_up(again)
    again.send_signal(signal.SIGINT)
    assert again.wait(10) == 0


@pytest.mark.slow
def test_down_kills_what_does_not_end(home: Home) -> None:
    """Parent and endpoint are stopped: they hear nothing."""
    process = home.start("up")
    home.until_up(process)
    for pid in (home.pid("serve"), process.pid):
        os.kill(pid, signal.SIGSTOP)
    code, out, err = home.run("down")
    assert code == 0
    assert f"up (pid {process.pid}) did not stop in time and was killed" in err
    assert out == f"ended: 2 processes of {home.up.parent}, none is left\n"
    assert home.none_left(1)


# ── following ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_learner_that_crashes_is_started_again_while_the_endpoint_stays(home: Home) -> None:
    hold(home, "follow")
    process = home.start("up", "--follow", "--backfill", "20260101..20260102/05")
    home.until_up(process)
    endpoint = home.pid("serve")
    for number in (signal.SIGKILL, signal.SIGSEGV):
        learner = reached(home, "follow")
        (home.folder / "at-follow").unlink()
        os.kill(learner, number)
    assert reached(home, "follow") != learner
    assert home.pid("serve") == endpoint
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    err = home.said(process)[1]
    assert (
        "learning ended by signal 9 (SIGKILL), perhaps because memory ran out; it is started again in 0.5 s"
        in err
    )
    assert "learning ended by signal 11 (SIGSEGV); it is started again in 1 s" in err
    assert "backfill of 30 hours" in err


@pytest.mark.slow
def test_an_error_of_following_ends_everything(home: Home) -> None:
    hold(home, "follow")
    process = home.start("up", "--follow")
    home.until_up(process)
    learner = reached(home, "follow")
    fault(home, "follow", "HourNotReady hour 7 never came")
    os.kill(learner, signal.SIGKILL)
    assert process.wait(15) == 4
    assert home.said(process)[1].splitlines()[-1] == "hour 7 never came"


@pytest.mark.slow
def test_following_without_an_endpoint_goes_on_until_it_is_stopped(home: Home) -> None:
    process = home.start("up", "--follow", "--no-serve", "-q")
    eventually(lambda: "hour 3" in home.said(process)[1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert "serve" not in home.state["stages"]


# ── wrong things ───────────────────────────────────────────────────────────────────────────────


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
def test_wrong_arguments_are_named_with_what_is_allowed(
    home: Home, arguments: list[str], message: str
) -> None:
    code, out, err = home.run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)


@pytest.mark.slow
def test_nothing_was_run_yet(home: Home) -> None:
    code, out, _ = home.run("status")
    assert (code, out.splitlines()[0]) == (0, f"nothing was run in {home.up.parent} yet: `clickline up` does")
    code, out, _ = home.run("down")
    assert (code, out) == (0, f"nothing runs for {home.up.parent}\n")
    code, out, err = home.run("logs")
    assert (code, out, err) == (0, "", f"nothing was run in {home.up.parent} yet: `clickline up` does\n")
