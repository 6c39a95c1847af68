"""Independent pieces of work, dealt to the processes of a cluster.

A piece whose process dies is dealt again, three times at most; an error that the work itself raises ends all of it.
So a piece must come to the same result when it is done twice, and leave nothing half done where others look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from clickline.distributed.session import Session
from clickline.errors import ClicklineError, ClusterError

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_ATTEMPTS = 3
_LOOK_SECONDS = 1.0  # between two looks whether the cluster is still there


class _Refused(NamedTuple):
    """An error of ours as plain values: some of its kinds do not come through to another process as they are."""

    kind: type[ClicklineError]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def error(self) -> ClicklineError:
        error = self.kind.__new__(self.kind, *self.arguments)
        error.__dict__.update(self.attributes)
        return error


def _work(function: Callable[[Any, Piece], Result], shared: Any, piece: Piece) -> Result | _Refused:
    try:
        return function(shared, piece)
    except ClicklineError as error:
        return _Refused(type(error), error.args, dict(error.__dict__))


class _Dealt:
    """A piece that is being worked on."""

    def __init__(self, submit: Callable[[Any], Any], piece: Any) -> None:
        self._submit = submit
        self._piece = piece
        self._failed = 0
        self.answer = submit(piece)

    def result(self) -> tuple[bool, Any]:
        """(True, its result), or (False, None) when its process died and it was dealt again."""
        try:
            result = ray.get(self.answer)
        except RayTaskError:
            raise  # a fault in the program: it would be the same the next time
        except RayError as error:
            self._failed += 1
            if self._failed == _ATTEMPTS:
                raise ClusterError(
                    f"a process of the cluster died {_ATTEMPTS} times at the same piece of work: {error}"
                ) from error
            self.answer = self._submit(self._piece)
            return False, None
        if isinstance(result, _Refused):
            raise result.error()
        return True, result


def deal(
    session: Session,
    function: Callable[[Any, Piece], Result],
    shared: Any,
    pieces: Iterable[Piece],
    *,
    at_once: int,
    in_order: bool = False,
) -> Iterator[Result]:
    """`function(shared, piece)` for every piece, on the cluster's CPUs; results as they are finished, or in order.

    At most `at_once` pieces are taken from `pieces` beyond those whose result was given out, so memory is bounded.
    `shared` is sent to each process once.
    """
    task: Any = ray.remote(num_cpus=1, max_retries=0)(_work)
    known = ray.put(shared)
    waiting: deque[_Dealt] = deque()

    def submit(piece: Piece) -> Any:
        return task.remote(function, known, piece)

    def next_result() -> Result:
        while True:
            ahead = [waiting[0]] if in_order else list(waiting)
            done, _ = ray.wait([dealt.answer for dealt in ahead], num_returns=1, timeout=_LOOK_SECONDS)
            if not done:
                if session.lost():
                    raise ClusterError(
                        "the Ray cluster is gone. What was finished is kept: run the same command again when it "
                        "is back."
                    )
                continue
            dealt = next(dealt for dealt in ahead if dealt.answer == done[0])
            finished, result = dealt.result()
            if finished:
                waiting.remove(dealt)
                given: Result = result
                return given

    # What still runs when the work is given up ends with the session. It is not cancelled: a task that is done at that
    # very moment makes Ray abort this process, and what went wrong would never be told.
    for piece in pieces:
        waiting.append(_Dealt(submit, piece))
        if len(waiting) >= at_once:
            yield next_result()
    while waiting:
        yield next_result()
