"""Translates a driver's failure into a StorageError: which URI, what happened, what to do.

Drivers raise OSError, the exceptions of aiohttp and botocore, ValueError, RuntimeError. They are classified by
their attributes (errno, a status, a name): no driver is imported just to name its exceptions.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clickline.errors import ClicklineError, StorageError

_CHECK_CREDENTIALS = (
    "Check the credentials (environment variables, or the file named by storage.credentials_file) "
    "and their permissions, and the clock of this machine: S3 rejects requests if it is minutes off."
)
_CHECK_NETWORK = "Check the address and the network, then run again."
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
}
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def translate_errors(uri: str, redact: Callable[[str], str]) -> Iterator[None]:
    """Turn any exception inside into a StorageError about `uri` that shows no secrets."""
    try:
        yield
    except ClicklineError:
        raise
    except Exception as error:  # noqa: BLE001  drivers raise anything; all of it is raised again
        # `from None`: a driver's message may hold a signed URL or a token, which a traceback would print.
        raise StorageError(redact(f"{uri}: {_cause_and_remedy(error)}")) from None


def is_missing(error: BaseException) -> bool:
    """Whether an exception means that nothing exists at the URI, and not that the lookup failed."""
    if isinstance(error, NotADirectoryError):
        return True  # a/b where a is a file
    if not isinstance(error, FileNotFoundError):
        return False
    # fsspec's HTTP driver reports every failure, even a dead server, as FileNotFoundError; the cause is specific.
    cause = error.__cause__
    return cause is None or (_status(cause) in (None, 404, 410) and not _unreachable(cause))


def _cause_and_remedy(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and not is_missing(error) and error.__cause__ is not None:
        error = error.__cause__
    name = type(error).__name__
    status = _status(error)
    message = _driver_message(error)
    if is_missing(error) or status in (404, 410):
        return "there is no such file, folder or bucket. Check the path."
    if name in _NO_CREDENTIALS:
        return (
            f"no usable credentials were found ({message}). Set the store's environment variables (for S3 "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or storage.credentials_file; "
            "a public bucket needs the option anon: true."
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"access was refused ({message}). {_CHECK_CREDENTIALS}"
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"the disk is full, or allows no larger file ({message}). Free some space, then run again."
    if isinstance(error, IsADirectoryError):
        return "this is a folder, a file is needed. Name a file in it, or all of them with /*."
    if name == "FileExpired":
        return "it was overwritten while it was being read. Run again when it no longer changes."
    if isinstance(error, NotImplementedError):
        return "this store does not support that. http:// and https:// are read-only."
    if _unreachable(error):
        return f"the store did not answer ({message}). {_CHECK_NETWORK}"
    if status is not None:
        return f"the store answered with status {status} ({message}). {_CHECK_NETWORK}"
    return f"the store failed ({message}). Run again; if it fails again, check the store's own log."


def _driver_message(error: BaseException) -> str:
    """The driver's message on one line of limited length, never empty."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    line = " ".join(str(text).split())
    line = line if len(line) <= 300 else line[:297] + "..."
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _status(error: BaseException) -> int | None:
    """The HTTP status in an exception: aiohttp has it as `status`, requests in `response`, gcsfs as `code`."""
    for source, field in (
        (error, "status"),
        (getattr(error, "response", None), "status_code"),
        (error, "code"),
    ):
        value = getattr(source, field, None)
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
