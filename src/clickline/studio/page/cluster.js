// The cluster panel: workers, embedding servers and their memory, and the last checkpoint.

import { meter } from "./charts.js";
import { h } from "./dom.js";
import { ago, count, duration, measure, percent, secondsSince, size } from "./format.js";
import { badge, card, figure, figures, nothing, notice, pairs, progress, table, when } from "./parts.js";
import { named, t } from "./words.js";

const TONES = { learning: "good", idle: "", starting: "run", lost: "bad" };

export const panel = {
  view({ status }) {
    const cluster = status?.cluster;
    const head = h("h1", {}, t("panel.cluster"));
    if (!cluster) return [head, nothing(t("cluster.none"), t("cluster.none.words"), "train: {mode: cluster}")];
    const { metrics: now = {}, last_checkpoint: checkpoint } = cluster;
    const share = now.total_rows ? now.rows / now.total_rows : null;
    const left = share && now.rows_per_second && cluster.alive ? (now.total_rows - now.rows) / now.rows_per_second : null;
    return [
      h(
        "div",
        { class: "headline" },
        head,
        h(
          "p",
          { class: "dim" },
          [
            t("cluster.run", { run: cluster.run }),
            named("cluster.state", cluster.state),
            cluster.mode ? named("cluster.mode", cluster.mode) : "",
            cluster.generation ? t("cluster.back", { n: cluster.generation }) : "",
          ].filter(Boolean).join(" · "),
        ),
      ),
      cluster.state === "lost" ? notice("bad", t("cluster.lost"), t("cluster.lost.words")) : null,
      cluster.message ? notice(cluster.state === "failed" ? "bad" : "info", named("cluster.state", cluster.state), cluster.message) : null,
      figures(
        figure(t("rows.learned"), count(now.rows), { note: share ? percent(share, 0) : null }),
        figure(t("speed.short"), count(now.rows_per_second), { note: left ? t("work.left", { time: duration(left) }) : null }),
        figure(t("auc"), measure(now.auc)),
        figure(t("loss"), measure(now.loss)),
        figure(t("step"), count(now.step)),
        figure(t("checkpoint.last"), checkpoint ? t("checkpoint.step", { n: count(checkpoint.step) }) : "–", { note: checkpoint ? ago(checkpoint.at) : null }),
      ),
      share === null || !cluster.alive ? null : progress(share, t("rows.learned")),
      workers(cluster),
      shards(cluster),
      h("div", { class: "columns even" }, units(cluster), decisions(cluster)),
    ];
  },
};

function workers({ workers: found = [], most, requested }) {
  const note = [most ? t("workers.most", { n: most }) : "", requested ? t("workers.requested", { n: requested }) : ""].filter(Boolean).join(" · ");
  const top = Math.max(1, ...found.map((one) => one.rows_per_second || 0));
  const columns = [
    { name: t("worker"), cell: (one) => one.name },
    { name: t("node"), cell: (one) => one.node },
    { name: t("state"), cell: (one) => badge(named("worker.state", one.state), TONES[one.state]) },
    { name: t("worker.at"), cell: (one) => one.at },
    { name: t("rows.short"), number: true, cell: (one) => count(one.rows) },
    { name: t("speed.short"), number: true, cell: (one) => count(one.rows_per_second) },
    {
      hidden: t("speed.short"),
      class: "bar-cell",
      cell: (one) => meter(one.rows_per_second / top, `${one.name}: ${t("speed", { n: count(one.rows_per_second) })}`),
    },
    { name: t("memory"), number: true, cell: (one) => (one.memory ? size(one.memory) : "–") },
  ];
  return card(
    t("workers", { n: found.length }),
    { note },
    found.length ? table(t("workers", { n: found.length }), columns, found, { key: (one) => one.name }) : h("p", { class: "dim" }, t("workers.none")),
  );
}

function shards({ shards: found = [], network }) {
  const all = [...found, ...(network ? [network] : [])];
  if (!all.length) return null;
  const most = Math.max(1, ...all.map((one) => one.memory || 0));
  const share = (one) => (one.limit ? one.memory / one.limit : null);
  const level = (one) => (share(one) > 0.95 ? "bad" : share(one) > 0.85 ? "warn" : "");
  const usage = (one) => `${size(one.memory)}${one.limit ? ` / ${size(one.limit)} (${percent(share(one), 0)})` : ""}`;
  const columns = [
    { name: t("shard"), cell: (one) => one.name },
    { name: t("node"), cell: (one) => one.node },
    { name: t("ids"), number: true, cell: (one) => (one.ids === null || one.ids === undefined ? "–" : count(one.ids)) },
    { name: t("memory"), class: "bar-cell", cell: (one) => meter(share(one) ?? one.memory / most, `${one.name}: ${usage(one)}`, level(one)) },
    { hidden: t("memory"), number: true, cell: usage },
  ];
  return card(t("shards", { n: found.length }), {}, table(t("shards", { n: found.length }), columns, all, { key: (one) => one.name }));
}

function units({ leases, last_checkpoint: checkpoint }) {
  const facts = [
    leases ? [t("units"), t("units.words", { done: count(leases.done), open: count(leases.open), todo: count(leases.todo) })] : null,
    checkpoint ? [
      t("checkpoint.last"),
      t("checkpoint.details", {
        step: count(checkpoint.step),
        age: ago(checkpoint.at),
        seconds: duration(checkpoint.seconds),
        stalled: duration(checkpoint.stalled),
      }),
    ] : null,
  ].filter(Boolean);
  return facts.length ? card(
    t("cluster.progress"),
    {},
    leases ? progress(leases.done / Math.max(1, leases.done + leases.open + leases.todo), t("units")) : null,
    pairs(facts),
  ) : null;
}

function decisions({ events = [] }) {
  if (!events.length) return card(t("decisions"), {}, h("p", { class: "dim" }, t("decisions.none")));
  return card(
    t("decisions"),
    {},
    h(
      "ol",
      { class: "moves" },
      [...events].reverse().map(
        (one) => h(
          "li",
          { key: one.at + one.reason },
          h("div", {}, h("p", {}, h("strong", {}, one.decision), ` · ${one.reason}`), h("p", { class: "dim" }, when(one.at))),
        ),
      ),
    ),
  );
}
