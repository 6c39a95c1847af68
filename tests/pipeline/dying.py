"""A process that kills itself at a named moment."""

from __future__ import annotations

import importlib
import os
import signal


def die_at(place: str, name: str, calls: int, after: bool) -> None:
    """When `name` of `place`, a module or module:class, is called for so many times; or `after` that call."""
    module, _, owner = place.partition(":")
    holder = importlib.import_module(module)
    if owner:
        holder = getattr(holder, owner)
    real, seen = getattr(holder, name), []

    def dies(*arguments, **options):
        seen.append(1)
        if len(seen) == calls and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if len(seen) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(holder, name, dies)
