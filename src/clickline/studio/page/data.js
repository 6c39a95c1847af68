// The data panel: the hours and their states, the dataset, quarantined rows.

import { get, homeUrl } from "./api.js";
import { lines } from "./charts.js";
import { h } from "./dom.js";
import { count, duration, measure, percent, short, size } from "./format.js";
import { card, choice, figure, figures, nothing, table, upCommand, waiting } from "./parts.js";
import { named, t } from "./words.js";

const STATES = ["learned", "refused", "learning", "waiting", "missing", "skipped", "corrupt", "empty"];
const LEVELS = 5;
const SLOTS = 200;

export const panel = {
  on: ["data"],
  load: ({ home }, signal) => get(`${homeUrl(home)}/data`, signal),
  view(page) {
    const { data, error } = page;
    const head = h("h1", {}, t("panel.data"));
    if (!data) return [head, waiting(error)];
    if (!data.dataset && !data.hours?.length) return [
      head,
      nothing(t("data.none"), t("data.none.words"), upCommand(page)),
    ];
    const hours = (data.hours || []).map((one) => (one.state === "learned" && one.gate === false ? { ...one, state: "refused" } : one)).sort((a, b) => (a.hour < b.hour ? -1 : 1));
    return [
      head,
      numbers(data, hours),
      hours.length ? [strip(page, hours), overTime(hours)] : null,
      h("div", { class: "columns even" }, dataset(data.dataset), quarantine(data)),
    ];
  },
};

function numbers({ summary = {}, dataset: prepared }, hours) {
  if (!hours.length) {
    const { train, eval: evaluation } = prepared?.splits || {};
    return figures(
      figure(t("rows.short"), count(prepared?.rows)),
      figure(t("rows.train"), count(train?.rows)),
      figure(t("rows.eval"), count(evaluation?.rows)),
      figure(t("base.rate"), percent(prepared?.click_rate, 2)),
      figure(t("quarantined"), count(summary.quarantined), { tone: summary.quarantined ? "warn" : "" }),
    );
  }
  return figures(
    figure(t("hours.received"), count(summary.received)),
    figure(t("hours.learned"), count(summary.learned)),
    figure(t("hours.waiting"), count(summary.waiting)),
    figure(t("rows.short"), short(hours.reduce((sum, one) => sum + (one.rows || 0), 0))),
    figure(t("quarantined"), count(summary.quarantined), { tone: summary.quarantined ? "warn" : "" }),
  );
}

// ── hours ──────────────────────────────────────────────────────────────────────────────────────

/** One row per day and one cell per hour; daily logs have one row per month. Arrow keys move between cells. */
function strip(page, hours) {
  const { memory } = page;
  const by = memory.by || "state";
  const daily = !hours[0].hour.includes("/");
  const chosen = hours.findIndex((one) => one.hour === memory.hour);
  const now = chosen < 0 ? hours.length - 1 : chosen;
  const level = levels(hours, by);
  const choose = (place) => {
    memory.hour = hours[Math.max(0, Math.min(hours.length - 1, place))].hour;
    page.draw();
  };
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: daily ? 31 : 24, ArrowUp: daily ? -31 : -24, Home: -Infinity, End: Infinity };
  const rows = new Map();
  hours.forEach((one, place) => {
    const row = daily ? one.hour.slice(0, 6) : one.hour.slice(0, 8);
    if (!rows.has(row)) rows.set(row, []);
    rows.get(row).push([one, place]);
  });
  return card(
    t("hours"),
    {
      note: t("hours.span", { from: hours[0].hour, to: hours.at(-1).hour }),
      side: choice(t("hours.by"), { state: t("state"), auc: t("auc"), rows: t("rows.short") }, by, (value) => ((memory.by = value), page.draw())),
    },
    h(
      "div",
      {
        class: `strip ${daily ? "daily" : "hourly"}`,
        role: "slider",
        tabindex: "0",
        "aria-label": t("hours"),
        "aria-valuemin": "1",
        "aria-valuemax": String(hours.length),
        "aria-valuenow": String(now + 1),
        "aria-valuetext": description(hours[now]),
        on: {
          keydown: (event) => {
            const step = steps[event.key];
            if (!step) return;
            event.preventDefault();
            choose(Number.isFinite(step) ? now + step : step < 0 ? 0 : hours.length - 1);
          },
          pointerover: (event) => event.target.dataset.place && choose(Number(event.target.dataset.place)),
        },
      },
      [...rows].map(([name, entries]) => {
        const cells = new Map(entries.map(([one, place]) => [Number(daily ? one.hour.slice(6, 8) : one.hour.split("/")[1]), [one, place]]));
        return h(
          "div",
          { class: "day", key: name },
          h("span", { class: "day-name" }, daily ? `${name.slice(0, 4)}-${name.slice(4)}` : `${name.slice(4, 6)}-${name.slice(6)}`),
          Array.from({ length: daily ? 31 : 24 }, (_, n) => {
            const [one, place] = cells.get(daily ? n + 1 : n) || [];
            if (!one) return h("span", { class: "cell none" });
            return h("span", { class: `cell ${level(one)}${place === now ? " chosen" : ""}`, "data-place": place });
          }),
        );
      }),
    ),
    h("p", { class: "strip-description" }, description(hours[now])),
    keys(hours, by, level),
  );
}

/** The colour class of an hour. */
function levels(hours, by) {
  const state = (one) => (STATES.includes(one.state) ? one.state : "other");
  if (by === "state") return state;
  const known = hours.map((one) => one[by]).filter(Number.isFinite).sort((a, b) => a - b);
  const bounds = Array.from({ length: LEVELS - 1 }, (_, n) => known[Math.floor(((n + 1) * known.length) / LEVELS)]);
  return (one) => (Number.isFinite(one[by]) ? `level${1 + bounds.filter((bound) => one[by] >= bound).length}` : state(one));
}

function description(one) {
  const parts = [named("hour.state", one.state)];
  if (Number.isFinite(one.rows)) parts.push(t("rows", { n: count(one.rows) }));
  if (one.bad) parts.push(t("prepare.bad", { n: count(one.bad) }));
  if (Number.isFinite(one.auc)) parts.push(`${t("auc")} ${measure(one.auc)}`);
  if (one.version) parts.push(`${t("version")} ${one.version}`);
  if (Number.isFinite(one.seconds)) parts.push(duration(one.seconds));
  if (one.reason) parts.push(one.reason);
  return `${one.hour}: ${parts.join(", ")}`;
}

function keys(hours, by, level) {
  const counts = new Map();
  for (const one of hours) counts.set(level(one), (counts.get(level(one)) || 0) + 1);
  const bounds = (name) => {
    const values = hours.filter((one) => level(one) === name).map((one) => one[by]).sort((a, b) => a - b);
    const write = by === "auc" ? (value) => value.toFixed(3) : short;
    return `${write(values[0])} – ${write(values.at(-1))}`;
  };
  const order = [...Array.from({ length: LEVELS }, (_, n) => `level${n + 1}`), ...STATES, "other"];
  return h(
    "ul",
    { class: "legend strip-keys" },
    order.filter((name) => counts.has(name)).map(
      (name) => h(
        "li",
        { key: name },
        h("span", { class: `cell ${name}`, "aria-hidden": "true" }),
        h("span", { class: "legend-name" }, name.startsWith("level") ? bounds(name) : named("hour.state", name)),
        h("span", { class: "legend-value" }, count(counts.get(name))),
      ),
    ),
  );
}

function overTime(hours) {
  const points = hours.map((one, n) => [n, one.auc]).filter(([, auc]) => Number.isFinite(auc));
  if (points.length < 2) return null;
  const name = (n) => hours[Math.max(0, Math.min(hours.length - 1, Math.round(n)))].hour;
  const places = [0, 1, 2, 3].map((n) => Math.round((n * (hours.length - 1)) / 3));
  return card(
    null,
    {},
    lines(
      "data-auc",
      {
        title: t("data.auc"),
        summary: t("last.value", { value: measure(points.at(-1)[1]) }),
        series: [{ name: t("auc"), points }],
        x: { write: name, places: [...new Set(places)], label: t("hours.axis") },
        y: { write: (value) => value.toFixed(3) },
        wide: true,
      },
    ),
  );
}

// ── rows ───────────────────────────────────────────────────────────────────────────────────────

function dataset(prepared) {
  if (!prepared) return null;
  const splits = Object.entries(prepared.splits || {});
  const slots = prepared.slots || [];
  const bad = (one) => Object.entries(one.bad || {}).map(([reason, n]) => `${reason} ${count(n)}`).join(", ") || count(one.bad_rows);
  return card(
    t("dataset"),
    { note: prepared.id },
    splits.length
      ? table(
        t("dataset"),
        [
          { name: t("split"), cell: ([name]) => named("split", name) },
          { name: t("rows.short"), number: true, cell: ([, one]) => count(one.rows) },
          { name: t("base.rate"), number: true, cell: ([, one]) => percent(one.click_rate, 2) },
          { name: t("bad.rows"), number: true, cell: ([, one]) => bad(one) },
          { name: t("files"), number: true, cell: ([, one]) => count(one.files) },
          { name: t("size"), number: true, cell: ([, one]) => size(one.bytes) },
        ],
        splits,
        { key: ([name]) => name },
      )
      : null,
    slots.length
      ? h(
        "details",
        {},
        h("summary", {}, t("slots", { n: slots.length })),
        table(
          t("slots", { n: slots.length }),
          [
            { name: t("slot"), cell: (one) => one.name },
            { name: t("distinct"), number: true, cell: (one) => count(one.distinct) },
            { name: t("missing"), number: true, cell: (one) => percent(one.missing_rate) },
            { name: t("top"), cell: (one) => (one.top || []).slice(0, 3).map(({ value, share }) => `${value} (${percent(share, 0)})`).join(", ") },
          ],
          slots.slice(0, SLOTS),
          { key: (one) => one.name },
        ),
        slots.length > SLOTS ? h("p", { class: "dim" }, t("slots.more", { n: count(slots.length - SLOTS) })) : null,
      )
      : null,
  );
}

function quarantine({ quarantine: rows = [], summary = {} }) {
  if (!rows.length) return card(t("quarantine"), {}, h("p", { class: "dim" }, t("quarantine.none")));
  return card(
    t("quarantine"),
    { note: t("quarantine.words", { n: count(rows.length), all: count(summary.quarantined) }) },
    h(
      "ul",
      { class: "samples" },
      rows.map(
        (one, n) => h(
          "li",
          { key: n },
          h("p", {}, h("strong", {}, one.reason), one.detail ? ` · ${one.detail}` : ""),
          h("p", { class: "dim" }, `${one.file ?? ""}${one.line === null || one.line === undefined ? "" : `:${one.line}`}`),
          h("pre", { tabindex: "0", "aria-label": t("quarantine.row", { line: one.line ?? n + 1 }) }, one.text ?? ""),
        ),
      ),
    ),
  );
}
