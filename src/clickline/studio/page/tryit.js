// The playground: rows from a form, scored by the live version, with an explanation and the previous version's score.

import { get, homeUrl, post } from "./api.js";
import { bars } from "./charts.js";
import { h } from "./dom.js";
import { count, milliseconds, percent, signed } from "./format.js";
import { badge, card, loading, nothing, notice, table, upCommand } from "./parts.js";
import { named, t } from "./words.js";

const MAX_ROWS = 50;
const CONTRIBUTIONS = 15;
const ORDER = new Intl.Collator("en", { numeric: true }); // I2 before I10

export const panel = {
  on: ["versions"],
  async load(page, signal) {
    const form = await get(`${homeUrl(page.home)}/form`, signal);
    const { memory } = page;
    if (!memory.rows && form.fields.length) {
      memory.rows = [{ ...(form.examples?.[0] ?? examples(form)) }];
      memory.chosen = 0;
    }
    if (form.fields.length && memory.version !== form.version) {
      memory.version = form.version;
      scheduleScoring(page);
    }
    return form;
  },
  view(page) {
    const { data, error, memory } = page;
    const head = h("h1", {}, t("panel.try"));
    if (!data && !error) return [head, loading()];
    const problem = data ? data.error : error.message || t("lost.title");
    if (problem || !data.fields.length) return [head, nothing(t("try.none"), problem, upCommand(page))];
    return [
      head,
      h("p", { class: "dim" }, t("try.words", { version: data.version ?? "–" })),
      h(
        "div",
        { class: "try-columns" },
        form(page),
        h(
          "div",
          { class: "stack answer", "aria-live": "polite" },
          memory.error ? notice("bad", t("try.failed"), memory.error) : null,
          result(page),
          candidates(page),
          explanation(page),
        ),
      ),
    ];
  },
};

const examples = (form) => Object.fromEntries(
  form.fields.filter((one) => one.example !== null && one.example !== undefined && one.example !== "").map((one) => [one.column, one.example]),
);

/** The rows as sent to the server: empty fields are omitted, numeric fields are numbers. */
function cleaned(form, row) {
  const dense = new Set(form.fields.filter((one) => one.kind === "dense").map((one) => one.column));
  const values = {};
  for (const [column, value] of Object.entries(row)) {
    const text = typeof value === "string" ? value.trim() : value;
    if (text === "" || text === null || text === undefined) continue;
    values[column] = typeof text === "string" && dense.has(column) && Number.isFinite(Number(text)) ? Number(text) : text;
  }
  return values;
}

/** Score again; Enter after an edit fires both change and submit, but sends one request. */
function scheduleScoring(page) {
  clearTimeout(page.memory.soon);
  page.memory.soon = setTimeout(() => score(page));
}

async function score(page) {
  const { home, memory } = page;
  memory.request?.abort();
  const request = (memory.request = new AbortController());
  memory.busy = true;
  page.draw();
  try {
    const form = page.data ?? (await get(`${homeUrl(home)}/form`, request.signal));
    memory.response = await post(`${homeUrl(home)}/try`, { rows: memory.rows.map((row) => cleaned(form, row)), explain: true }, request.signal);
    memory.scoredRows = memory.rows.map((row) => ({ ...row }));
    memory.error = null;
  } catch (error) {
    if (error.name === "AbortError") return;
    memory.error = error.message || t("lost.title");
  }
  memory.busy = false;
  page.draw();
}

// ── the form ───────────────────────────────────────────────────────────────────────────────────

function form(page) {
  const { data, memory } = page;
  const row = memory.rows[memory.chosen];
  const query = (memory.search || "").trim().toLowerCase();
  const shown = [...data.fields].sort((a, b) => ORDER.compare(a.column, b.column)).filter((one) => !query || one.name.toLowerCase().includes(query) || one.column.toLowerCase().includes(query));
  const kinds = { dense: t("try.numbers"), slot: t("try.categories") };
  const fill = (event) => {
    const place = event.target.value;
    event.target.value = "";
    if (place === "") return;
    memory.rows[memory.chosen] = place === "empty" ? {} : { ...data.examples[Number(place)] };
    scheduleScoring(page);
  };
  return card(
    memory.rows.length > 1 ? t("try.candidate", { n: memory.chosen + 1 }) : t("try.row"),
    {
      class: "form-card",
      side: [
        data.fields.length > 12 ? h(
          "input",
          {
            type: "search",
            placeholder: t("try.search"),
            "aria-label": t("try.search"),
            value: memory.search || "",
            on: { input: (event) => ((memory.search = event.target.value), page.draw()) },
          },
        ) : null,
        h(
          "select",
          { "aria-label": t("try.fill"), on: { change: fill } },
          h("option", { value: "" }, t("try.fill")),
          (data.examples || []).map((_, n) => h("option", { value: String(n), key: n }, t("try.example", { n: n + 1 }))),
          h("option", { value: "empty" }, t("try.empty")),
        ),
      ],
    },
    h(
      "form",
      {
        on: {
          submit: (event) => {
            event.preventDefault();
            scheduleScoring(page);
          },
        },
      },
      Object.entries(kinds).map(([kind, title]) => {
        const fields = shown.filter((one) => one.kind === kind);
        return fields.length ? h(
          "fieldset",
          { key: kind },
          h("legend", {}, title),
          h("div", { class: "fields" }, fields.map((one) => input(page, one, row))),
        ) : null;
      }),
      shown.length ? null : h("p", { class: "dim" }, t("search.none")),
      h(
        "div",
        { class: "buttons" },
        h("button", { type: "submit", class: "primary" }, t("try.ask")),
        h("button", { type: "button", disabled: memory.rows.length >= MAX_ROWS, on: { click: () => add(page) } }, t("try.add")),
        h("span", { class: "dim" }, t("try.enter")),
      ),
    ),
  );
}

function input(page, field, row) {
  const { memory } = page;
  const id = `field-${field.column}`;
  const top = field.top || [];
  const before = memory.scoredRows?.[memory.chosen]?.[field.column] ?? "";
  const value = row[field.column] ?? "";
  return h(
    "div",
    { class: `field${String(before) === String(value) ? "" : " changed"}`, key: field.column },
    h(
      "label",
      { for: id },
      field.name === field.column ? field.name : `${field.column}`,
      field.multi ? h("small", { class: "dim" }, ` ${t("try.multi")}`) : null,
    ),
    h("input", {
      id,
      value: String(value),
      inputmode: field.kind === "dense" ? "decimal" : null,
      list: top.length ? `top-${field.column}` : null,
      placeholder: t("try.missing"),
      autocomplete: "off",
      spellcheck: "false",
      on: {
        input: (event) => {
          row[field.column] = event.target.value;
          page.draw();
        },
        change: () => scheduleScoring(page),
      },
    }),
    top.length ? h("datalist", { id: `top-${field.column}` }, top.map((one) => h("option", { value: String(one), key: one }))) : null,
  );
}

function add(page) {
  const { memory } = page;
  memory.rows.push({ ...memory.rows[memory.chosen] });
  memory.chosen = memory.rows.length - 1;
  scheduleScoring(page);
}

function remove(page, place) {
  const { memory } = page;
  memory.rows.splice(place, 1);
  memory.chosen = Math.max(0, Math.min(memory.chosen, memory.rows.length - 1));
  scheduleScoring(page);
}

// ── the scores ─────────────────────────────────────────────────────────────────────────────────

function result({ memory }) {
  const scored = memory.response?.rows[memory.chosen];
  if (!scored) return memory.error ? null : card(null, { class: "result" }, loading());
  const { previous } = scored;
  const change = previous ? scored.probability - previous.probability : null;
  return card(
    null,
    { class: `result${memory.busy ? " busy" : ""}` },
    h("p", { class: "result-name" }, t("try.probability", { version: memory.response.version })),
    h("p", { class: "probability" }, percent(scored.probability, 2)),
    h(
      "p",
      { class: "dim" },
      previous ? t(
        "try.previous",
        { version: previous.version, value: percent(previous.probability, 2), change: signed(100 * change, (value) => value.toFixed(2)) },
      ) : memory.response.note || t("try.noprevious"),
      " · ",
      milliseconds(memory.response.latency_ms),
    ),
  );
}

function candidates(page) {
  const { memory } = page;
  const { response: scored, rows } = memory;
  if (rows.length < 2 || !scored || scored.rows.length !== rows.length) return null;
  const shared = Object.keys({ ...Object.assign({}, ...rows) }).filter((column) => new Set(rows.map((row) => String(row[column] ?? ""))).size > 1);
  const columns = [
    { name: t("try.rank"), number: true, cell: ([, rank]) => String(rank) },
    {
      name: t("try.candidate.short"),
      cell: ([place]) => h(
        "button",
        {
          type: "button",
          class: "quiet",
          "aria-pressed": String(place === memory.chosen),
          on: { click: () => ((memory.chosen = place), page.draw()) },
        },
        t("try.candidate", { n: place + 1 }),
      ),
    },
    { name: t("try.p"), number: true, cell: ([place]) => percent(scored.rows[place].probability, 2) },
    { name: t("try.before"), number: true, cell: ([place]) => (scored.rows[place].previous ? percent(scored.rows[place].previous.probability, 2) : "–") },
    {
      name: t("try.differs"),
      class: "differs",
      cell: ([place]) => shared.slice(0, 3).map((column) => `${column} ${rows[place][column] || t("try.missing")}`).join(", "),
    },
    {
      hidden: t("actions"),
      cell: ([place]) => h(
        "button",
        { type: "button", class: "quiet", "aria-label": t("try.remove", { n: place + 1 }), on: { click: () => remove(page, place) } },
        "✕",
      ),
    },
  ];
  return card(
    t("try.ranking"),
    {},
    table(
      t("try.ranking"),
      columns,
      scored.ranking.map((place, n) => [place, n + 1]),
      { key: ([place]) => place, rowClass: ([place]) => (place === memory.chosen ? "live" : null) },
    ),
  );
}

function explanation({ memory, draw }) {
  const scored = memory.response?.rows[memory.chosen];
  if (!scored?.contributions?.length) return null;
  const row = memory.scoredRows?.[memory.chosen] || {};
  const shown = memory.all ? scored.contributions : scored.contributions.slice(0, CONTRIBUTIONS);
  const items = shown.map(
    (one) => ({
      name: one.column,
      note: row[one.column] === undefined || row[one.column] === "" ? t("try.missing") : String(row[one.column]),
      value: one.change,
      text: `${signed(100 * one.change, (value) => value.toFixed(2))}`,
    }),
  );
  const top = scored.contributions[0];
  return card(
    null,
    {},
    bars(
      "why",
      {
        title: t("why"),
        summary: t("why.summary", { column: top.column, change: signed(100 * top.change, (value) => value.toFixed(2)) }),
        items,
        diverging: true,
        head: [t("field"), t("why.change")],
      },
    ),
    h("p", { class: "dim" }, t("why.words")),
    shown.length < scored.contributions.length ? h(
      "button",
      { type: "button", on: { click: () => ((memory.all = true), draw()) } },
      t("show.all", { n: count(scored.contributions.length) }),
    ) : null,
  );
}
