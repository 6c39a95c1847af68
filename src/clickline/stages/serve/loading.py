"""Opens a version so that it can answer: load, score its stored sample, compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from clickline.artifacts.manifest import read_manifest
from clickline.artifacts.version import VERSION_FORMAT
from clickline.config.sections import ServeSection
from clickline.scoring.scorer import Scorer
from clickline.stages.serve.versions import ScorerLike
from clickline.storage.stores import Storage

__all__ = ["Load", "open_version"]

Load = Callable[[Sequence[Path], ServeSection, Path], ScorerLike]
"""Opens the version whose files lie in these folders, base first; the last argument is a folder that the workers
share for as long as the version is used. Raises if it does not give its stored sample the stored scores."""


def open_version(folders: Sequence[Path], serve: ServeSection, work: Path) -> ScorerLike:
    body = read_manifest(Storage(), str(folders[-1]), "version", VERSION_FORMAT)
    scorer = Scorer.open(body, folders, threads=serve.threads, work=work)
    try:
        scorer.check_sample()
    except BaseException:
        scorer.close()
        raise
    return scorer
