// The versions panel: versions over time, their diff, the live one; roll back, promote, pin.

import { get, homeUrl, post, token } from "./api.js";
import { timeline } from "./charts.js";
import { ask, tokenField } from "./dialogs.js";
import { h } from "./dom.js";
import { ago, count, measure, moment, plain, signed, size } from "./format.js";
import { badge, card, failure, figure, figures, loading, nothing, notice, table, when } from "./parts.js";
import { named, t } from "./words.js";

const FIRST = 30;
const DIFF_FIRST = 40;
const STATES = { current: "good", pinned: "warn", previous: "", damaged: "bad" };

export const panel = {
  on: ["versions"],
  async load({ home, memory }, signal) {
    const versions = await get(`${homeUrl(home)}/versions`, signal);
    const [a, b] = memory.pair || [versions.previous, versions.current];
    if (a && b && a !== b) {
      memory.pair = [a, b];
      memory.diff = await get(`${homeUrl(home)}/versions/diff?a=${a}&b=${b}`, signal).catch((error) => {
        if (error.name === "AbortError") throw error;
        return { error: error.message };
      });
    } else memory.diff = null;
    return versions;
  },
  view(page) {
    const { data, error } = page;
    const head = h("h1", {}, t("panel.versions"));
    const problem = error ? failure(error) : null;
    if (!data) return [head, problem || loading()];
    if (data.error) return [head, notice("bad", t("registry.title"), data.error)];
    if (!data.list.length) return [head, problem, nothing(t("versions.none"), t("versions.none.words"), "clickline publish")];
    return [head, problem, live(page), overTime(page), list(page), h("div", { class: "columns even" }, diff(page), moves(page))];
  },
};

function live(page) {
  const { data } = page;
  const now = data.list.find((one) => one.version === data.current);
  const buttons = [
    data.previous ? h(
      "button",
      { type: "button", on: { click: () => act(page, "rollback", data.previous) } },
      t("rollback.to", { version: data.previous }),
    ) : null,
    data.pinned ? h("button", { type: "button", on: { click: () => act(page, "unpin", data.current) } }, t("unpin")) : data.current ? h(
      "button",
      { type: "button", on: { click: () => act(page, "pin", data.current) } },
      t("pin.this", { version: data.current }),
    ) : null,
  ];
  return h(
    "div",
    { class: "live-line" },
    figures(
      figure(t("live.version"), data.current ?? "–", { note: data.pinned ? t("pinned") : now ? tableKind(now) : null, tone: "main" }),
      figure(t("auc"), measure(now?.auc)),
      figure(t("logloss"), measure(now?.logloss)),
      figure(t("age"), now ? ago(now.created) : "–"),
      figure(t("versions.total"), count(data.list.length)),
    ),
    h("div", { class: "buttons" }, buttons),
  );
}

const tableKind = (one) => (one.parent ? t("table.delta.of", { parent: one.parent }) : named("table", one.table));

function overTime(page) {
  const { data } = page;
  const known = data.list.filter((one) => Number.isFinite(one.auc)).reverse();
  if (known.length < 2) return null;
  const items = known.map(
    (one) => ({
      x: one.version,
      y: one.auc,
      shape: one.table === "base" ? "square" : "round",
      tone: one.version === data.current ? "live" : "s1",
      chosen: one.version === data.current,
      name: `${t("version")} ${one.version}, ${tableKind(one)}: ${t("auc")} ${measure(one.auc)}, ${moment(one.created)}`,
      version: one.version,
    }),
  );
  const best = known.reduce((top, one) => (one.auc > top.auc ? one : top));
  return card(
    null,
    {},
    timeline("versions", {
      title: t("versions.timeline"),
      summary: t("versions.best", { version: best.version, auc: measure(best.auc) }),
      items,
      x: { label: t("version"), write: (value) => (Number.isInteger(value) ? String(value) : "") },
      y: { write: (value) => value.toFixed(3) },
      keys: [
        { name: t("table.base"), shape: "square", tone: "s1" },
        { name: t("table.delta"), shape: "round", tone: "s1" },
        { name: t("live.short"), shape: "round", tone: "live" },
      ],
      table: () => ({ head: [t("version"), t("auc")], rows: known.map((one) => [String(one.version), measure(one.auc)]) }),
      choose: (one) => compare(page, one.version),
    }),
  );
}

function compare(page, version) {
  const { data, memory } = page;
  if (version === data.current) return;
  memory.pair = [version, data.current];
  page.reload();
  document.getElementById("diff")?.scrollIntoView({ block: "nearest" });
  page.announce(t("diff.title", { a: version, b: data.current }));
}

function list(page) {
  const { data, memory } = page;
  const query = (memory.search || "").trim().toLowerCase();
  const matching = query ? data.list.filter((one) => `${one.version} ${one.table} ${(one.state || []).join(" ")} ${one.created}`.toLowerCase().includes(query)) : data.list;
  const shown = memory.all ? matching : matching.slice(0, FIRST);
  const columns = [
    { name: t("version"), number: true, cell: (one) => String(one.version) },
    { name: t("state"), cell: (one) => (one.state || []).map((name) => badge(named("version.state", name), STATES[name])) },
    { name: t("table"), cell: (one) => tableKind(one) },
    { name: t("age"), cell: (one) => when(one.created) },
    { name: t("auc"), number: true, cell: (one) => measure(one.auc) },
    { name: t("logloss"), number: true, cell: (one) => measure(one.logloss) },
    { name: t("rows.short"), number: true, cell: (one) => count(one.rows) },
    { name: t("size"), number: true, cell: (one) => size(one.bytes) },
    {
      hidden: t("actions"),
      class: "row-buttons",
      cell: (one) =>
        one.version === data.current
          ? null
          : [
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": t("diff.with", { version: one.version }),
                  on: { click: () => compare(page, one.version) },
                },
                t("diff.short"),
              ),
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": t(one.version > data.current ? "promote.to" : "rollback.to", { version: one.version }),
                  on: { click: () => act(page, one.version > data.current ? "promote" : "rollback", one.version) },
                },
                t(one.version > data.current ? "promote.short" : "rollback.short"),
              ),
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": t("pin.this", { version: one.version }),
                  on: { click: () => act(page, "pin", one.version) },
                },
                t("pin.short"),
              ),
            ],
    },
  ];
  const search = data.list.length > 8 ? h(
    "input",
    {
      type: "search",
      placeholder: t("search"),
      "aria-label": t("versions.search"),
      value: memory.search || "",
      on: { input: (event) => ((memory.search = event.target.value), page.draw()) },
    },
  ) : null;
  return card(
    t("versions.list"),
    { side: search },
    shown.length ? table(
      t("versions.list"),
      columns,
      shown,
      { key: (one) => one.version, rowClass: (one) => (one.version === data.current ? "live" : null) },
    ) : h("p", { class: "dim" }, t("search.none")),
    shown.length < matching.length ? h(
      "button",
      { type: "button", on: { click: () => ((memory.all = true), page.draw()) } },
      t("show.all", { n: count(matching.length) }),
    ) : null,
  );
}

function diff(page) {
  const { data, memory } = page;
  if (data.list.length < 2) return null;
  const [a, b] = memory.pair || [];
  const choose = (place) => (event) => {
    const pair = [...(memory.pair || [data.list[1].version, data.list[0].version])];
    pair[place] = Number(event.target.value);
    memory.pair = pair;
    page.reload();
  };
  const select = (place, chosen, label) => h(
    "select",
    { "aria-label": label, on: { change: choose(place) } },
    data.list.map(
      (one) => h(
        "option",
        { value: String(one.version), key: one.version, selected: one.version === chosen },
        `${one.version}${one.version === data.current ? ` · ${t("live.short")}` : ""}`,
      ),
    ),
  );
  return card(
    t("diff"),
    { id: "diff", side: [select(0, a, t("diff.first")), h("span", { "aria-hidden": "true" }, "→"), select(1, b, t("diff.second"))] },
    !memory.diff ? h("p", { class: "dim" }, t("diff.choose")) : memory.diff.error ? notice(
      "bad",
      t("error.title"),
      memory.diff.error,
    ) : differences(memory.diff, a, b),
  );
}

function differences(changes, a, b) {
  const parts = ["measures", "contents", "features", "config"].map((part) => {
    const pairs = Object.entries(changes[part] || {});
    return h(
      "details",
      { key: part, open: part === "measures" || part === "contents" },
      h("summary", {}, t(`diff.${part}`), " ", h("span", { class: "dim" }, pairs.length ? t("diff.count", { n: pairs.length }) : t("diff.same"))),
      pairs.length
        ? table(
          t(`diff.${part}`),
          [
            { name: t("diff.what"), cell: ([name]) => name },
            { name: String(a), number: true, cell: ([, [old]]) => plain(old) },
            { name: String(b), number: true, cell: ([, [, fresh]]) => plain(fresh) },
            {
              name: t("diff.change"),
              number: true,
              cell: ([, [old, fresh]]) => (typeof old === "number" && typeof fresh === "number" ? signed(fresh - old, (value) => plain(value)) : ""),
            },
          ],
          pairs.slice(0, DIFF_FIRST),
          { key: ([name]) => name },
        )
        : null,
      pairs.length > DIFF_FIRST ? h("p", { class: "dim" }, t("diff.more", { n: pairs.length - DIFF_FIRST, a, b })) : null,
    );
  });
  return h("div", { class: "diff" }, parts);
}

function moves({ data }) {
  const recent = (data.moves || []).slice(0, 12);
  return card(
    t("moves"),
    {},
    h(
      "ol",
      { class: "moves" },
      recent.map(
        (one) => h(
          "li",
          { key: one.sequence },
          h("span", { class: "move-version" }, String(one.version)),
          h(
            "div",
            {},
            h("p", {}, one.reason || "–", one.pinned ? [" ", badge(t("pinned"), "warn")] : null),
            h("p", { class: "dim" }, when(one.at), one.by ? ` · ${one.by}` : ""),
          ),
        ),
      ),
    ),
  );
}

/** Roll back, promote, pin or unpin after a confirmation with a reason; the token is asked for once per session. */
async function act(page, verb, version) {
  const { home } = page;
  const fields = [{ name: "reason", label: t("reason"), hint: t("reason.hint"), long: true }];
  const file = page.status?.studio?.token_file;
  if (!token()) fields.push(tokenField(file ? t("token.file", { file }) : t("token.where")));
  const done = await ask({
    title: t(`${verb}.title`, { version }),
    text: t(`${verb}.words`, { version, current: page.data.current }),
    fields,
    verb: t(`${verb}.verb`, { version }),
    danger: verb === "rollback",
    act: async (values) => {
      const before = token();
      if (values.token) token(values.token);
      try {
        await post(`${homeUrl(home)}/actions/${verb}`, verb === "unpin" ? { reason: values.reason } : { reason: values.reason, version });
      } catch (error) {
        if (error.status === 401 || error.status === 403) {
          token(values.token ? before : null);
          if (!values.token) error.message = `${error.message} ${t("token.forgotten")}`;
        }
        throw error;
      }
    },
  });
  if (done) {
    page.announce(t(`${verb}.done`, { version }));
    page.reload();
  }
}
