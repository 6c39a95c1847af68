// The log panel: the last lines of a stage.

import { homeUrl, text } from "./api.js";
import { h } from "./dom.js";
import { card, loading, notice, nothing } from "./parts.js";
import { named, t } from "./words.js";

const LINES = 400;

export const panel = {
  on: ["status"],
  async load({ home, rest }, signal) {
    const body = await text(`${homeUrl(home)}/logs/${encodeURIComponent(rest[0] || "up")}?tail=${LINES}`, signal);
    const lines = body.startsWith("{") ? JSON.parse(body).lines : body.split("\n");
    return { text: lines.join("\n").trimEnd() };
  },
  view({ data, error, rest, link, status, memory }) {
    const stages = ["up", ...Object.keys(status?.stages || {})];
    const stage = rest[0] || "up";
    const scrolled = ({ target }) => (memory.above = target.scrollTop + target.clientHeight < target.scrollHeight - 4);
    requestAnimationFrame(() => {
      const shown = document.querySelector("pre.log");
      if (shown && !memory.above) shown.scrollTop = shown.scrollHeight; // scroll to the newest line, unless the user scrolled up
    });
    return [
      h("h1", {}, t("log.of", { stage: named("stage", stage) })),
      h(
        "p",
        { class: "log-stages" },
        stages.map((name) => h("a", { key: name, href: link("log", name), "aria-current": name === stage ? "true" : null }, named("stage", name))),
      ),
      error ? notice("bad", t("error.title"), error.message) : null,
      !data ? (error ? null : loading()) : data.text ? card(
        null,
        { class: "log-card" },
        h("pre", { class: "log", tabindex: "0", on: { scroll: scrolled }, "aria-label": t("log.of", { stage: named("stage", stage) }) }, data.text),
      ) : nothing(t("log.none")),
    ];
  },
};
