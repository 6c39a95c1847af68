// Components shared by several panels.

import { meter } from "./charts.js";
import { formatText, h } from "./dom.js";
import { ago, moment } from "./format.js";
import { t } from "./words.js";

/** A part of a panel with its heading; `side` is at its right. */
export const card = (title, attributes, ...children) => {
  const { side, note, ...rest } = attributes || {};
  const head = title || side ? h(
    "div",
    { class: "card-head" },
    title ? h("h2", {}, title) : null,
    note ? h("span", { class: "dim" }, note) : null,
    side ? h("div", { class: "card-side" }, side) : null,
  ) : null;
  return h("section", { ...rest, class: `card ${rest.class || ""}`.trim() }, head, children);
};

/** A large number. */
export const figure = (name, value, { note, tone, spark } = {}) =>
  h(
    "div",
    { class: `figure ${tone || ""}`.trim(), key: `figure-${name}` },
    h("dt", {}, name),
    h("dd", {}, h("span", { class: "figure-value" }, value), note ? h("span", { class: "figure-note" }, note) : null, spark || null),
  );

export const figures = (...items) => h("dl", { class: "figures" }, items);

export const badge = (text, tone = "") => h("span", { class: `badge ${tone}`.trim() }, text);

/** An empty state: a heading, the reason, and the command that changes it. */
export const nothing = (title, text, command, more) =>
  h(
    "div",
    { class: "nothing" },
    h("p", { class: "nothing-title" }, title),
    text ? h("p", {}, formatText(text)) : null,
    command ? h("pre", { class: "command", tabindex: "0" }, command) : null,
    more || null,
  );

/** A notice above everything else. tone: bad, warn, info. */
export const notice = (tone, title, ...children) =>
  h(
    "div",
    { class: `notice ${tone}`, key: `notice-${title}`, role: tone === "bad" ? "alert" : "note" },
    h("strong", {}, title),
    children.filter(Boolean).map((child) => (typeof child === "string" ? h("p", { class: "message" }, formatText(child)) : child)),
  );

/** The notice about a failed request. */
export const failure = (error) => notice("bad", t("error.title"), error.message || t("lost.title"));

/** What a panel shows before its data is there. */
export const waiting = (error) => (error ? failure(error) : loading());

/** The command that fills an empty panel. */
export const upCommand = ({ about }) => `clickline up -c ${about?.config ?? "clickline.yaml"}`;

/** Names and values below each other. */
export const pairs = (entries) => h("dl", { class: "pairs" }, entries.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

export const loading = () => h("p", { class: "loading dim" }, t("loading"));

export const when = (at) => h("time", { datetime: at, title: moment(at) }, ago(at));

/** A progress bar; without a known total it only shows that work is running. */
export const progress = (share, label) =>
  share === null || share === undefined ? h("div", { class: "progress unknown", role: "progressbar", "aria-label": label }, h("span", {})) : h(
    "div",
    {
      class: "progress",
      role: "progressbar",
      "aria-label": label,
      "aria-valuemin": "0",
      "aria-valuemax": "100",
      "aria-valuenow": String(Math.round(100 * share)),
    },
    meter(share, label),
  );

/** A table in a box that scrolls on its own. columns: [{name, number?, cell(row)}] */
export const table = (label, columns, rows, { key, rowClass, caption } = {}) =>
  h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      {},
      caption ? h("caption", {}, caption) : null,
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(
            (one) => h("th", { scope: "col", class: one.number ? "number" : null }, one.name || h("span", { class: "unseen" }, one.hidden || "")),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row, n) =>
          h(
            "tr",
            { key: key ? key(row) : n, class: rowClass ? rowClass(row) : null },
            columns.map(
              (one, place) => h(
                place === 0 && !one.plain ? "th" : "td",
                { scope: place === 0 && !one.plain ? "row" : null, class: [one.number ? "number" : "", one.class || ""].join(" ").trim() || null },
                one.cell(row),
              ),
            ),
          ),
        ),
      ),
    ),
  );

/** A choice of a few, such as the metric or the order. options: {value: label} */
export const choice = (label, options, chosen, choose) =>
  h(
    "div",
    { class: "choice", role: "radiogroup", "aria-label": label, on: { keydown: arrows } },
    Object.entries(options).map(([value, text]) =>
      h(
        "button",
        {
          type: "button",
          role: "radio",
          key: value,
          "aria-checked": String(value === chosen),
          tabindex: value === chosen ? "0" : "-1",
          on: { click: () => choose(value) },
        },
        text,
      ),
    ),
  );

/** Arrow keys move within a group; Home and End to its ends. In radio groups they select. */
export function arrows(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!step) return;
  const all = [...event.currentTarget.querySelectorAll("a, button")];
  const now = all.indexOf(document.activeElement);
  if (now < 0) return;
  event.preventDefault();
  const next = Number.isFinite(step) ? all[(now + step + all.length) % all.length] : step < 0 ? all[0] : all.at(-1);
  next.focus();
  if (next.getAttribute("role") === "radio") next.click();
}

export function copier(text) {
  return h(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-label": `${t("copy")}: ${text}`,
      on: {
        click: async (event) => {
          const button = event.currentTarget;
          try {
            await navigator.clipboard.writeText(text);
            button.textContent = t("copied");
            setTimeout(() => (button.textContent = t("copy")), 1500);
          } catch {
            button.textContent = t("copy.failed");
          }
        },
      },
    },
    t("copy"),
  );
}
