// The serving panel: requests, latency, errors and missing ids of the endpoint.

import { get, homeUrl } from "./api.js";
import { bars, lines } from "./charts.js";
import { h } from "./dom.js";
import { ago, clock, count, milliseconds, percent, short } from "./format.js";
import { card, figure, figures, nothing, notice, upCommand, waiting } from "./parts.js";
import { t } from "./words.js";

const SLOTS = 30;

export const panel = {
  on: ["versions"],
  reloads: () => Math.floor(Date.now() / 1000) % 3 === 0, // totals; the points come as events
  load: async ({ home }, signal) => ({ serving: await get(`${homeUrl(home)}/serving`, signal) }),
  view(page) {
    const { data, error, link, status } = page;
    const head = h("h1", {}, t("panel.serving"));
    if (!data) return [head, waiting(error)];
    const { serving } = data;
    const never = !serving.alive && !serving.history?.length && !["running", "starting"].includes(status?.state);
    if (never) return [
      head,
      nothing(t("serving.none"), serving.reason || t("serving.none.words"), upCommand(page)),
    ];
    return [
      head,
      serving.alive ? null : notice(
        "bad",
        t("serving.dead"),
        serving.reason || "",
        t("serving.dead.words"),
        h("p", {}, h("a", { href: link("log", "serve") }, t("log.of", { stage: t("stage.serve") }))),
      ),
      numbers(serving),
      h("div", { class: "grid" }, history(serving)),
      h(
        "div",
        { class: "columns" },
        misses(serving),
        h(
          "div",
          { class: "stack" },
          split(t("serving.codes"), "codes", serving.by_code),
          split(t("serving.protocols"), "protocols", serving.by_protocol),
        ),
      ),
    ];
  },
};

function numbers(serving) {
  const last = serving.alive ? serving.history?.at(-1) : null;
  const { totals = {} } = serving;
  const errors = last?.errors_per_second;
  const slow = serving.alive ? serving.history?.findLast((one) => Number.isFinite(one.p99_ms)) : null; // of the last second with requests
  const note = slow && slow !== last ? ago(slow.at) : null;
  return figures(
    figure(t("qps"), last ? short(last.qps) : "–", { note: last ? t("serving.rows", { n: short(last.rows_per_second) }) : null }),
    figure(t("p50"), milliseconds(slow?.p50_ms), { note }),
    figure(t("p99"), milliseconds(slow?.p99_ms), { note }),
    figure(t("errors.second"), last ? short(errors) : "–", { tone: errors > 0 ? "bad" : "" }),
    figure(t("version"), serving.version ?? "–"),
    figure(t("requests"), count(totals.requests), { note: totals.errors ? t("serving.errors", { n: count(totals.errors) }) : null }),
  );
}

function history(serving) {
  const points = serving.history || [];
  const valuesOf = (key) => points.map((one) => [Date.parse(one.at), one[key] ?? NaN]);
  const x = { write: (value) => clock(value).slice(0, 8), places: places(points) };
  const last = points.at(-1) || {};
  const slow = points.findLast((one) => Number.isFinite(one.p99_ms)) || {};
  const chart = (id, title, summary, series, write) => card(
    null,
    { key: id },
    lines(`serving-${id}`, { title, summary, series, x: { ...x, label: t("axis.utc") }, y: { write, zero: true } }),
  );
  if (points.length < 2) return card(null, {}, h("p", { class: "dim" }, serving.alive ? t("serving.waiting") : t("serving.nothing")));
  return [
    chart("qps", t("qps"), t("last.value", { value: short(last.qps) }), [{ name: t("qps"), points: valuesOf("qps") }], short),
    chart(
      "latency",
      t("latency"),
      t("serving.latency", { p50: milliseconds(slow.p50_ms), p99: milliseconds(slow.p99_ms) }),
      [{ name: "p50", points: valuesOf("p50_ms") }, { name: "p99", points: valuesOf("p99_ms"), tone: "s2" }],
      (value) => `${short(value)} ms`,
    ),
    chart(
      "errors",
      t("errors.second"),
      t("last.value", { value: short(last.errors_per_second) }),
      [{ name: t("errors.second"), points: valuesOf("errors_per_second"), tone: "bad" }],
      short,
    ),
  ];
}

/** Positions of the time labels: at most four, a round number of points apart. */
function places(points) {
  if (points.length < 2) return [];
  const [first, last] = [Date.parse(points[0].at), Date.parse(points.at(-1).at)];
  return [0, 1, 2, 3].map((n) => first + (n * (last - first)) / 3);
}

function misses({ slots = [] }) {
  const known = slots.filter((one) => one.lookups > 0).sort((a, b) => b.miss_rate - a.miss_rate);
  if (!known.length) return card(t("misses"), {}, h("p", { class: "dim" }, t("misses.none")));
  const missing = known.filter((one) => one.misses > 0);
  const items = missing.slice(0, SLOTS).map(
    (one) => ({ name: one.slot, value: one.miss_rate, text: percent(one.miss_rate), tone: one.miss_rate > 0.5 ? "warn" : "s1" }),
  );
  return card(
    t("misses"),
    { note: t("misses.words") },
    bars(
      "misses",
      {
        title: t("misses.title"),
        summary: t("misses.summary", { slot: known[0].slot, share: percent(known[0].miss_rate) }),
        items,
        max: 1,
        head: [t("slot"), t("misses")],
      },
    ),
    known.length > items.length ? h(
      "p",
      { class: "dim" },
      t(missing.length ? "misses.more" : "misses.no", { n: known.length - items.length }),
    ) : null,
  );
}

function split(title, id, counts) {
  const pairs = Object.entries(counts || {});
  if (!pairs.length) return null;
  const total = pairs.reduce((sum, [, value]) => sum + value, 0) || 1;
  return card(
    null,
    { key: id },
    bars(
      `split-${id}`,
      {
        title,
        items: pairs.sort((a, b) => b[1] - a[1]).map(
          ([name, value]) => ({
            name,
            value: value / total,
            text: count(value),
            tone: id === "codes" && !/^(OK|ok|2\d\d)$/.test(name) ? "bad" : "s1",
          }),
        ),
        max: 1,
      },
    ),
  );
}
