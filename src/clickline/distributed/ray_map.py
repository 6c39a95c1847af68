"""Maps a function over independent pieces of work on a Ray cluster.

A piece whose process dies is submitted again, up to three times; an error that the function itself raises ends the
whole map. So a piece must be idempotent, and must not leave partial results where others look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from clickline.distributed.session import RaySession
from clickline.errors import ClicklineError, ClusterError

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_ATTEMPTS = 3
_LOOK_SECONDS = 1.0  # between two checks that the cluster is alive


class _RemoteError(NamedTuple):
    """A ClicklineError as plain values: not all of its subclasses can be sent between processes."""

    kind: type[ClicklineError]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def error(self) -> ClicklineError:
        error = self.kind.__new__(self.kind, *self.arguments)
        error.__dict__.update(self.attributes)
        return error


def _work(function: Callable[[Any, Piece], Result], shared: Any, piece: Piece) -> Result | _RemoteError:
    try:
        return function(shared, piece)
    except ClicklineError as error:
        return _RemoteError(type(error), error.args, dict(error.__dict__))


class _Task:
    """A submitted piece."""

    def __init__(self, submit: Callable[[Any], Any], piece: Any) -> None:
        self._submit = submit
        self._piece = piece
        self._failed = 0
        self.ref = submit(piece)

    def result(self) -> tuple[bool, Any]:
        """(True, its result), or (False, None) if its process died and it was submitted again."""
        try:
            result = ray.get(self.ref)
        except RayTaskError:
            raise  # a bug: it would fail again
        except RayError as error:
            self._failed += 1
            if self._failed == _ATTEMPTS:
                raise ClusterError(
                    f"a process of the cluster died {_ATTEMPTS} times on the same piece of work: {error}"
                ) from error
            self.ref = self._submit(self._piece)
            return False, None
        if isinstance(result, _RemoteError):
            raise result.error()
        return True, result


def ray_map(
    session: RaySession,
    function: Callable[[Any, Piece], Result],
    shared: Any,
    pieces: Iterable[Piece],
    *,
    max_pending: int,
    in_order: bool = False,
) -> Iterator[Result]:
    """`function(shared, piece)` for every piece on the cluster's CPUs; results as they finish, or in order.

    At most `max_pending` pieces are in flight, so memory is bounded. `shared` is sent to each process once.
    """
    remote_function: Any = ray.remote(num_cpus=1, max_retries=0)(_work)
    shared_ref = ray.put(shared)
    pending: deque[_Task] = deque()

    def submit(piece: Piece) -> Any:
        return remote_function.remote(function, shared_ref, piece)

    def next_result() -> Result:
        while True:
            ahead = [pending[0]] if in_order else list(pending)
            done, _ = ray.wait([task.ref for task in ahead], num_returns=1, timeout=_LOOK_SECONDS)
            if not done:
                if session.lost():
                    raise ClusterError(
                        "the Ray cluster is gone. Finished work is kept: run the same command again when it is "
                        "back."
                    )
                continue
            task = next(task for task in ahead if task.ref == done[0])
            finished, result = task.result()
            if finished:
                pending.remove(task)
                typed: Result = result
                return typed

    # Tasks that still run when the work is given up end with the session. They are not cancelled: a task that finishes
    # that very moment makes Ray abort this process, and the error would never be reported.
    for piece in pieces:
        pending.append(_Task(submit, piece))
        if len(pending) >= max_pending:
            yield next_result()
    while pending:
        yield next_result()
