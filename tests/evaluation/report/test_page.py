"""The report page is self-contained and escapes all user text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest
from example_documents import HOSTILE, bare, document, hostile, long, old, one_class, refused

from clickline.errors import ClicklineError
from clickline.evaluation.report import templating
from clickline.evaluation.report.comparison_page import comparison_page
from clickline.evaluation.report.page import page, write_page
from clickline.evaluation.report.plots import figures
from clickline.evaluation.report.templating import number, percent, signed
from clickline.storage.storage import Storage


class Parsed(HTMLParser):
    """A parsed page: elements with their attributes, scripts by id, and the text outside of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles = ""
        self.text = ""
        self.tables: list[list[list[str]]] = []
        self._in = ""
        self._in_table = False
        self.feed(text)
        self.close()

    def handle_starttag(self, name, attrs):
        self.elements.append((name, dict(attrs)))
        self._in = name
        if name == "script":
            self.scripts.append((dict(attrs), ""))
        elif name == "table":
            self.tables.append([])
            self._in_table = True
        elif name == "tr":
            self.tables[-1].append([])
        elif name in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, name):
        self._in = "" if name in ("script", "style") else self._in
        self._in_table = self._in_table and name != "table"

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._in == "style":
            self.styles += data
        else:
            self.text += data
            if self._in_table and self.tables[-1] and self.tables[-1][-1]:
                self.tables[-1][-1][-1] += data.strip()

    def json(self, id):
        (found,) = [text for attributes, text in self.scripts if attributes.get("id") == id]
        return json.loads(found)


@pytest.fixture(scope="module")
def whole():
    return Parsed(page(document()))


@pytest.mark.parametrize("make", [document, refused, bare, one_class, long, hostile, old])
def test_page_embeds_the_document_and_its_figures(make):
    found = Parsed(page(make()))
    assert found.json("report") == make()
    assert found.json("figures") == figures(make())
    drawn = {attributes["data-figure"] for _, attributes in found.elements if "data-figure" in attributes}
    assert drawn == figures(make()).keys()


@pytest.mark.parametrize("text", [page(document()), comparison_page(("a", document()), ("b", refused()))])
def test_page_fetches_nothing_and_runs_no_other_script(text):
    found = Parsed(text)
    for name, attributes in found.elements:
        assert name not in ("link", "img", "iframe", "object", "embed", "base", "form"), name
        assert not {"src", "action", "srcset", "background"} & attributes.keys()
        assert not any(attribute.startswith("on") for attribute in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"url\(|@import", found.styles)
    (policy,) = [a["content"] for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy and "unsafe-eval" not in policy
    run = [script for attributes, script in found.scripts if "type" not in attributes]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in run]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert len(run) == 2


def test_user_text_is_escaped_in_the_page():
    found = Parsed(page(hostile()))
    names = [name for name, _ in found.elements]
    assert "img" not in names and "b" not in names
    assert found.text.count("</script><img src=x onerror=") > 8
    assert found.json("report")["slot_table"][0]["slot"] == HOSTILE
    both = Parsed(comparison_page((HOSTILE, hostile()), (HOSTILE, document())))
    assert not {"img", "b"} & {name for name, _ in both.elements}
    assert "&lt;" not in both.text  # escaped once, not twice


def test_name_that_is_not_utf8_can_be_written(tmp_path):
    write_page(hostile(), str(tmp_path / "report.html"), Storage())
    assert r"caf\udce9.tsv" in (tmp_path / "report.html").read_text("utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_verdict_and_key_metrics_come_first(whole):
    measured, live = document()["evaluation"], document()["current"]["evaluation"]
    before = whole.text[: whole.text.index("Ranking quality")]
    assert "✓ The gate passed the model" in before
    low, high = measured["auc_interval"]
    assert f"{measured['auc']:.4f}" in before and f"95 %: {low:.4f} to {high:.4f}" in before
    assert f"+{measured['auc'] - live['auc']:.4f} better than version 3 ({live['auc']:.4f})" in before
    assert f"−{live['logloss'] - measured['logloss']:.4f} better than version 3" in before
    assert "3,486 clicks in 20,000 impressions" in before


def test_refused_report_shows_the_reasons():
    found = Parsed(page(refused()))
    top = found.text[: found.text.index("Ranking quality")]
    assert "✗ The gate refused the model" in top
    assert all(reason in top for reason in refused()["gate"]["reasons"])
    assert "accuracy is the only threshold of the gate" in top
    assert " worse than version 3" in top


def test_captions_have_the_key_figures(whole):
    found = document()
    auc, ece = found["evaluation"]["auc"], found["evaluation"]["ece"]
    assert f"in {100 * auc:.1f} % of all pairs, the click scores higher" in whole.text
    assert f"in 20 bins of equal weight (ECE): {100 * ece:.1f} %" in whole.text
    gain = found["curves"]["gain"]
    tenth = min(range(len(gain["lift"])), key=lambda n: abs(gain["share_of_impressions"][n] - 0.1))
    assert f"by score get {100 * gain['share_of_clicks'][tenth]:.1f} % of the clicks" in whole.text
    assert f"Clicks are {gain['lift'][tenth]:.2f} times as frequent" in whole.text
    first = found["importance"][0]
    assert f"{first['name']} is the most important field: AUC drops by {first['lost']:.4f}" in whole.text
    assert (
        f"Largest: {found['drift']['fields'][0]['name']}, {found['drift']['fields'][0]['psi']:.4f}"
        in whole.text
    )


def test_every_plot_has_its_table():
    found = long()
    tables = Parsed(page(found)).tables
    by_header = {tuple(rows[0]): rows[1:] for rows in tables}
    hours = by_header["hour (UTC)", "rows", "clicks", "AUC", "95 %", "log loss", "95 %", "calibration"]
    assert len(hours) == 300  # the last of the two tables
    assert len(by_header["field", "kind", "AUC lost", "AUC without"]) == 203
    slots = next(
        rows for header, rows in by_header.items() if header[:3] == ("field", "kind", "values, train")
    )
    assert len(slots) == 203
    first = found["slot_table"][0]
    assert slots[0] == [
        first["slot"],
        "slot",
        f"{first['distinct_train']:,}",
        f"{first['distinct_eval']:,}",
        percent(first["missing_train"]),
        percent(first["missing_eval"]),
        f"{first['ids']:,}",
        f"{first['candidates']:,}",
        f"{first['evicted']:,}",
        percent(first["unseen_eval"]),
    ]
    roc = by_header["false positive rate", "true positive rate"]
    assert len(roc) == len(found["curves"]["roc"]["true_positive_rate"])
    drift = next(rows for header, rows in by_header.items() if header[-1] == "PSI")
    assert [row[-1] for row in drift] == [number(one["psi"]) for one in found["drift"]["fields"]]
    assert drift[0][2] == "strong"


def test_page_shows_lineage_and_config(whole):
    for words in ("Dataset 4b97f1cd351b", "942,080 train rows", "48 input files", "and 42 more",
                  "Checkpoint at step 4,600", "1,884,160 rows trained", "embedding_dim: 9"):  # fmt: skip
        assert words in whole.text
    assert "before it was published" in whole.text
    of_version = document()
    of_version["lineage"]["version"] = 7
    assert "Report of version 7" in Parsed(page(of_version)).text


def test_missing_parts_are_omitted_and_listed(whole):
    assert "Not included" not in whole.text
    assert "Not included" in Parsed(page(old())).text
    text = Parsed(page(bare())).text
    assert "Not evaluated: there were no eval rows." in text
    assert "data.eval gives no rows to measure on." in text
    assert "The document has no data for: ROC, precision-recall, gain and lift, the calibration curve" in text
    assert "Loss, AUC and speed" in text and "Ranking quality" not in text
    assert "all 500 impressions lack a click" in Parsed(page(one_class())).text


@pytest.mark.parametrize("key", sorted(document()))
@pytest.mark.parametrize("how", ["absent", "null"])
def test_any_document_key_may_be_missing(key, how):
    found = document()
    if how == "absent":
        del found[key]
    else:
        found[key] = None
    assert '<main id="report-body">' in page(found)
    for pair in ((found, document()), (document(), found)):
        assert "Comparison of two reports" in comparison_page(*zip("ab", pair, strict=True))


def test_nan_and_infinity_become_null():
    found = document()
    found["evaluation"]["logloss"] = float("nan")
    found["curves"]["gain"]["lift"][0] = float("inf")
    parsed = Parsed(page(found))
    assert parsed.json("report")["evaluation"]["logloss"] is None
    assert parsed.json("figures")["lift"]["data"][0]["y"][0] is None


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_missing_package_error_names_the_extra(monkeypatch, tmp_path, package):
    templating._environment.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ClicklineError, match=rf"need the package {package}: pip install 'clickline\[report\]'"
    ):
        write_page(document(), str(tmp_path / "report.html"), Storage())
    assert not list(tmp_path.iterdir())


def test_number_formats():
    assert [number(v) for v in (0.12345, 0.0, None, 3e-6)] == ["0.1235", "0.0000", "–", "3e-06"]
    assert [percent(v) for v in (0.1234, 0.0, 0.0002, 1.0)] == ["12.3 %", "0.0 %", "0.02 %", "100.0 %"]
    assert [signed(v) for v in (0.01, -0.01, None)] == ["+0.0100", "−0.0100", "–"]
