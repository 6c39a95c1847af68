"""Makes a process kill itself at a given call."""

from __future__ import annotations

import importlib
import os
import signal


def kill_at(target: str, name: str, calls: int, after: bool) -> None:
    """Kill this process at the `calls`-th call of `name` of `target` (a module or module:class), or `after` that call."""
    module, _, owner = target.partition(":")
    owner_object = importlib.import_module(module)
    if owner:
        owner_object = getattr(owner_object, owner)
    original, count = getattr(owner_object, name), []

    def killing(*arguments, **options):
        count.append(1)
        if len(count) == calls and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if len(count) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner_object, name, killing)
