"""The name that a mistyped one probably means is found among thousands without comparing all of them."""

from __future__ import annotations

import time

import pytest

from clickline.wire import name_matching
from clickline.wire.name_matching import nearest_name

MANY = tuple(
    f"{group}_{kind}_{n}" for group in ("user", "ad", "page") for kind in ("id", "tag") for n in range(1700)
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user_id_17_", "user_id_17"),
        ("User_Id_17", "user_id_17"),
        ("xad_tag_12", "ad_tag_12"),
        ("age_tag_1650", "page_tag_1650"),
        ("page_tagg_1650", "page_tag_1650"),
        ("page_tag_1650O", "page_tag_1650"),
    ],
)
def test_mistyped_name_is_found_among_thousands(name: str, expected: str) -> None:
    assert nearest_name(name, MANY) == expected


def test_unique_name_has_no_neighbor() -> None:
    assert nearest_name("ü" * 1000, MANY) is None
    assert nearest_name("", MANY) is None
    assert nearest_name("anything", ()) is None


def test_few_names_are_all_compared() -> None:
    assert nearest_name("b_city_x", ("a", "bb_city", "c")) == "bb_city"


def test_only_a_few_of_many_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    original = name_matching.get_close_matches

    def counted(word: str, names: tuple[str, ...], n: int, cutoff: float) -> list[str]:
        compared.append(len(names))
        return original(word, names, n=n, cutoff=cutoff)

    monkeypatch.setattr(name_matching, "get_close_matches", counted)
    for n in range(200):
        nearest_name(f"usr_id_{n}x" * (n % 9 + 1), MANY)
    assert max(compared) <= 48  # and not 10,200


def test_many_wrong_names_are_cheap() -> None:
    nearest_name("first", MANY)  # sorts them
    began = time.process_time()
    for n in range(100):
        nearest_name(f"user_tag_{n}_{'wrong' * 10}", MANY)
    assert (time.process_time() - began) / 100 < 0.01  # 0.4 ms; all 10,200 took 240 ms
