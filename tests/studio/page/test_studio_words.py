"""Both languages say the same things, and nothing is said in neither."""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "src" / "clickline" / "studio" / "page"
ENGLISH: dict[str, str] = json.loads((PAGE / "words.en.json").read_text())
CHINESE: dict[str, str] = json.loads((PAGE / "words.zh.json").read_text())
SOURCE = "\n".join(path.read_text() for path in sorted(PAGE.glob("*.js")))


def test_both_languages_have_the_same_keys() -> None:
    assert list(ENGLISH) == list(CHINESE)


def test_both_languages_fill_in_the_same_values() -> None:
    def names(words: dict[str, str]) -> dict[str, set[str]]:
        return {key: set(re.findall(r"\{(\w+)\}", text)) for key, text in words.items()}

    assert names(ENGLISH) == names(CHINESE)


def test_no_duplicate_keys() -> None:
    def once(pairs: list[tuple[str, str]]) -> dict[str, str]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    for name in ("en", "zh"):
        json.loads((PAGE / f"words.{name}.json").read_text(), object_pairs_hook=once)


def test_every_used_key_exists() -> None:
    assert sorted(set(re.findall(r'\bt\(\s*"([^"]+)"', SOURCE)) - set(ENGLISH)) == []


def test_every_key_is_used() -> None:
    """By its name, or as one of a family: t(`stage.${name}`), named("stage", name), t(`${verb}.title`)."""
    asked = set(re.findall(r'"([a-z][\w.]*)"', SOURCE))
    families = set(re.findall(r"\bt\(\s*`([\w.]+)\$\{", SOURCE)) | {
        f"{name}." for name in re.findall(r'\bnamed\(\s*"([^"]+)"', SOURCE)
    }
    endings = tuple(re.findall(r"\bt\(\s*`\$\{\w+\}(\.\w+)`", SOURCE))
    lone = [
        key
        for key in ENGLISH
        if key not in asked and not key.startswith(tuple(families)) and not key.endswith(endings)
    ]
    assert lone == []


def test_chinese_is_chinese() -> None:
    same = {key for key in ENGLISH if ENGLISH[key] == CHINESE[key]}
    assert same == {"auc", "p50", "p99", "roc", "axis.utc"}


def test_scripts_insert_no_markup() -> None:
    """Text from logs and rows must never become markup."""
    assert (
        re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function", SOURCE
        )
        == []
    )


def test_page_references_only_its_own_files() -> None:
    everything = SOURCE + (PAGE / "index.html").read_text() + (PAGE / "style.css").read_text()
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"'`]+", everything) == []
    assert re.findall(r"\sstyle=|<style|javascript:", everything) == []
