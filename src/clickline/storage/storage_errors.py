"""Any driver's failure as a StorageError: which URI, what happened, what to do.

Drivers raise OSError, the trees of aiohttp and botocore, ValueError, RuntimeError. They are told apart by
what they carry (errno, a status, a name): no driver is imported just to name its errors.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clickline.errors import ClicklineError, StorageError

_CHECK_CREDENTIALS = (
    "Check the credentials (environment variables, or the file named by storage.credentials) "
    "and what they allow, and the clock of this machine: S3 refuses one that is minutes off."
)
_CHECK_NETWORK = "Check the address and the network, then run again."
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def explained(uri: str, redact: Callable[[str], str]) -> Iterator[None]:
    """Turn whatever goes wrong inside into a StorageError about `uri` that shows no secret."""
    try:
        yield
    except ClicklineError:
        raise
    except Exception as error:  # noqa: BLE001  drivers raise what they like; all of it is raised on
        # `from None`: a driver's message may hold a signed URL or a token, and a traceback would print it.
        raise StorageError(redact(f"{uri}: {_cause_and_remedy(error)}")) from None


def is_missing(error: BaseException) -> bool:
    """Whether a driver says that there is nothing at the address, as opposed to having failed to look."""
    if isinstance(error, NotADirectoryError):
        return True  # a/b where a is a file
    if not isinstance(error, FileNotFoundError):
        return False
    # fsspec's HTTP driver reports every failure, a dead server too, as FileNotFoundError; the cause tells.
    cause = error.__cause__
    return cause is None or (_status(cause) in (None, 404, 410) and not _unreachable(cause))


def _cause_and_remedy(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and not is_missing(error) and error.__cause__ is not None:
        error = error.__cause__
    name = type(error).__name__
    status = _status(error)
    words = _words(error)
    if is_missing(error) or status in (404, 410):
        return "there is no such file, folder or bucket. Check the path."
    if name in _NO_CREDENTIALS:
        return (
            f"no usable credentials were found ({words}). Set the store's environment variables (for S3 "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or storage.credentials; "
            "a public bucket needs the option anon: true."
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"access was refused ({words}). {_CHECK_CREDENTIALS}"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"the disk is full, or allows no larger file ({words}). Free some space, then run again."
    if isinstance(error, IsADirectoryError):
        return "this is a folder, a file is needed. Name a file in it, or all of them with /*."
    if name == "FileExpired":
        return "it was overwritten while it was being read. Run again when it no longer changes."
    if isinstance(error, NotImplementedError):
        return "this store cannot do that. http:// and https:// can only be read."
    if _unreachable(error):
        return f"the store did not answer ({words}). {_CHECK_NETWORK}"
    if status is not None:
        return f"the store answered with status {status} ({words}). {_CHECK_NETWORK}"
    return f"the store failed ({words}). Run again; if it stays so, look at the store's own log."


def _words(error: BaseException) -> str:
    """The driver's message on one line of sane length, never empty."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    line = " ".join(str(text).split())
    line = line if len(line) <= 300 else line[:297] + "..."
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error: aiohttp has it as `status`, requests in `response`, gcsfs as `code`."""
    for holder, field in (
        (error, "status"),
        (getattr(error, "response", None), "status_code"),
        (error, "code"),
    ):
        value = getattr(holder, field, None)
        if isinstance(value, int):
            return value
    return None


def _unreachable(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        kinds
        & {
            "ConnectionError",  # Python's and requests' alike
            "TimeoutError",
            "Timeout",
            "ClientConnectionError",
            "ClientPayloadError",
            "HTTPClientError",
            "gaierror",
        }
    )
