"""Injects faults into the processes of a cluster run, driver and actors, at an exact moment.

The folder CLICKLINE_MOMENTS contains `settings.json`, values to set in modules (or defaults of their methods), and
faults, each a JSON file: at which call of a function (`at`: module[:class], name) a process does what (`do`):

    kill    it dies by SIGKILL, `after` the call if that is set, else before
    stop    it stops by SIGSTOP
    fail    this call raises, once
    drop    this call does nothing, once
    hold    this call waits for the file `<fault>.release`; other threads continue
    raise   it raises whenever the first argument is of that batch
    slow    every call takes 0.2 s longer
    note    every error that the function raises is written to `<fault>.notes`

The first process at that call takes the fault (`.taken`, with its pid), so that the others continue.
Modules are changed when they are imported: most processes of Ray never import them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path


def _strikes(file: Path, fault: dict, real):
    calls = itertools.count(1)

    def strike(number: int) -> bool:
        """Whether the call is dropped."""
        taken = file.with_suffix(".taken")
        if number == fault["call"]:
            try:
                file.rename(taken)
            except FileNotFoundError:
                return False
            taken.write_text(str(os.getpid()))
            if fault["do"] == "hold":
                while not file.with_suffix(".release").exists():
                    time.sleep(0.02)
            elif fault["do"] == "fail":
                raise ZeroDivisionError("a fault of the test")
            elif fault["do"] == "drop":
                return True
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault["do"] == "kill" else signal.SIGSTOP)
        return False

    @functools.wraps(real)
    def struck(*arguments, **options):
        number = next(calls)
        if not fault["after"] and strike(number):
            return None
        result = real(*arguments, **options)
        if fault["after"]:
            strike(number)
        return result

    @functools.wraps(real)
    def noted(*arguments, **options):
        try:
            return real(*arguments, **options)
        except Exception as error:
            with file.with_suffix(".notes").open("a") as notes:
                notes.write(f"{type(error).__name__}: {error}\n")
            raise

    @functools.wraps(real)
    def raises(owner, first, *arguments, **options):
        if first.key.sequence == fault["call"] and file.exists():
            raise ZeroDivisionError("a fault of the test")
        return real(owner, first, *arguments, **options)

    @functools.wraps(real)
    def slow(*arguments, **options):
        time.sleep(0.2)
        return real(*arguments, **options)

    return {"note": noted, "raise": raises, "slow": slow}.get(fault["do"], struck)


class _Change(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._settings = json.loads((folder / "settings.json").read_text())
        self._faults = {file: json.loads(file.read_text()) for file in sorted(folder.glob("fault-*.json"))}
        self._modules = {*self._settings, *(f["at"][0].partition(":")[0] for f in self._faults.values())}

    def find_spec(self, name, path, target=None):
        if name not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec

    def _change(self, module) -> None:
        for name, value in self._settings.get(module.__name__, {}).items():
            owner, _, method = name.partition(".")
            if method:  # the one default value that it has
                function = getattr(getattr(module, owner), method)
                function = getattr(function, "__func__", function)
                if function.__kwdefaults__:
                    function.__kwdefaults__ = dict.fromkeys(function.__kwdefaults__, value)
                else:
                    function.__defaults__ = (value,)
            else:
                setattr(module, name, value)
        for file, fault in self._faults.items():
            place, name = fault["at"]
            of, _, owner = place.partition(":")
            if of == module.__name__:
                holder = getattr(module, owner) if owner else module
                setattr(holder, name, _strikes(file, fault, getattr(holder, name)))


if "CLICKLINE_MOMENTS" in os.environ:
    sys.meta_path.insert(0, _Change(Path(os.environ["CLICKLINE_MOMENTS"])))
