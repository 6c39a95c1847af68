// The playground: rows from a form, scored by the live version, with an explanation and the previous version's score.

import { get, of, post } from "./api.js";
import { bars } from "./charts.js";
import { h } from "./dom.js";
import { count, milliseconds, percent, signed } from "./format.js";
import { badge, card, loading, nothing, notice, table, upCommand } from "./parts.js";
import { named, t } from "./words.js";

const MOST = 50;
const CONTRIBUTIONS = 15;
const ORDER = new Intl.Collator("en", { numeric: true }); // I2 before I10

export const panel = {
  on: ["versions"],
  async load(page, signal) {
    const form = await get(`${of(page.home)}/form`, signal);
    const { memory } = page;
    if (!memory.rows && form.fields.length) {
      memory.rows = [{ ...(form.examples?.[0] ?? examples(form)) }];
      memory.chosen = 0;
    }
    if (form.fields.length && memory.version !== form.version) {
      memory.version = form.version;
      answer(page);
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
          memory.trouble ? notice("bad", t("try.failed"), memory.trouble) : null,
          result(page),
          candidates(page),
          why(page),
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
  const found = {};
  for (const [column, value] of Object.entries(row)) {
    const text = typeof value === "string" ? value.trim() : value;
    if (text === "" || text === null || text === undefined) continue;
    found[column] = typeof text === "string" && dense.has(column) && Number.isFinite(Number(text)) ? Number(text) : text;
  }
  return found;
}

/** Score again; Enter after an edit fires both change and submit, but sends one request. */
function answer(page) {
  clearTimeout(page.memory.soon);
  page.memory.soon = setTimeout(() => ask(page));
}

async function ask(page) {
  const { home, memory } = page;
  memory.asked?.abort();
  const mine = (memory.asked = new AbortController());
  memory.busy = true;
  page.draw();
  try {
    const form = page.data ?? (await get(`${of(home)}/form`, mine.signal));
    memory.answer = await post(`${of(home)}/try`, { rows: memory.rows.map((row) => cleaned(form, row)), explain: true }, mine.signal);
    memory.answered = memory.rows.map((row) => ({ ...row }));
    memory.trouble = null;
  } catch (error) {
    if (error.name === "AbortError") return;
    memory.trouble = error.message || t("lost.title");
  }
  memory.busy = false;
  page.draw();
}

// ── the form ───────────────────────────────────────────────────────────────────────────────────

function form(page) {
  const { data, memory } = page;
  const row = memory.rows[memory.chosen];
  const wanted = (memory.search || "").trim().toLowerCase();
  const shown = [...data.fields].sort((a, b) => ORDER.compare(a.column, b.column)).filter((one) => !wanted || one.name.toLowerCase().includes(wanted) || one.column.toLowerCase().includes(wanted));
  const kinds = { dense: t("try.numbers"), slot: t("try.categories") };
  const fill = (event) => {
    const place = event.target.value;
    event.target.value = "";
    if (place === "") return;
    memory.rows[memory.chosen] = place === "empty" ? {} : { ...data.examples[Number(place)] };
    answer(page);
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
            answer(page);
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
        h("button", { type: "button", disabled: memory.rows.length >= MOST, on: { click: () => add(page) } }, t("try.add")),
        h("span", { class: "dim" }, t("try.enter")),
      ),
    ),
  );
}

function input(page, field, row) {
  const { memory } = page;
  const id = `field-${field.column}`;
  const top = field.top || [];
  const before = memory.answered?.[memory.chosen]?.[field.column] ?? "";
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
        change: () => answer(page),
      },
    }),
    top.length ? h("datalist", { id: `top-${field.column}` }, top.map((one) => h("option", { value: String(one), key: one }))) : null,
  );
}

function add(page) {
  const { memory } = page;
  memory.rows.push({ ...memory.rows[memory.chosen] });
  memory.chosen = memory.rows.length - 1;
  answer(page);
}

function remove(page, place) {
  const { memory } = page;
  memory.rows.splice(place, 1);
  memory.chosen = Math.max(0, Math.min(memory.chosen, memory.rows.length - 1));
  answer(page);
}

// ── the scores ─────────────────────────────────────────────────────────────────────────────────

function result({ memory }) {
  const said = memory.answer?.rows[memory.chosen];
  if (!said) return memory.trouble ? null : card(null, { class: "result" }, loading());
  const { previous } = said;
  const change = previous ? said.probability - previous.probability : null;
  return card(
    null,
    { class: `result${memory.busy ? " busy" : ""}` },
    h("p", { class: "result-name" }, t("try.probability", { version: memory.answer.version })),
    h("p", { class: "probability" }, percent(said.probability, 2)),
    h(
      "p",
      { class: "dim" },
      previous ? t(
        "try.previous",
        { version: previous.version, value: percent(previous.probability, 2), change: signed(100 * change, (value) => value.toFixed(2)) },
      ) : memory.answer.note || t("try.noprevious"),
      " · ",
      milliseconds(memory.answer.latency_ms),
    ),
  );
}

function candidates(page) {
  const { memory } = page;
  const { answer: said, rows } = memory;
  if (rows.length < 2 || !said || said.rows.length !== rows.length) return null;
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
    { name: t("try.p"), number: true, cell: ([place]) => percent(said.rows[place].probability, 2) },
    { name: t("try.before"), number: true, cell: ([place]) => (said.rows[place].previous ? percent(said.rows[place].previous.probability, 2) : "–") },
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
      said.ranking.map((place, n) => [place, n + 1]),
      { key: ([place]) => place, rowClass: ([place]) => (place === memory.chosen ? "live" : null) },
    ),
  );
}

function why({ memory, draw }) {
  const said = memory.answer?.rows[memory.chosen];
  if (!said?.contributions?.length) return null;
  const row = memory.answered?.[memory.chosen] || {};
  const shown = memory.all ? said.contributions : said.contributions.slice(0, CONTRIBUTIONS);
  const items = shown.map(
    (one) => ({
      name: one.column,
      note: row[one.column] === undefined || row[one.column] === "" ? t("try.missing") : String(row[one.column]),
      value: one.change,
      text: `${signed(100 * one.change, (value) => value.toFixed(2))}`,
    }),
  );
  const top = said.contributions[0];
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
    shown.length < said.contributions.length ? h(
      "button",
      { type: "button", on: { click: () => ((memory.all = true), draw()) } },
      t("show.all", { n: count(said.contributions.length) }),
    ) : null,
  );
}
