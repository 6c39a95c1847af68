// The runs panel: all training runs, their learning curves in one chart, and the details of one run.

import { get, homeUrl, post, token } from "./api.js";
import { bars, lines } from "./charts.js";
import { formatText, h } from "./dom.js";
import { count, duration, measure, moment, percent, plain, short, signed } from "./format.js";
import { badge, card, choice, failure, figure, figures, loading, nothing, notice, pairs, table, upCommand, waiting, when } from "./parts.js";
import { named, t } from "./words.js";

const MAX_CURVES = 6; // curves that are still distinguishable
const NEWEST = 3; // plotted by default
const FIRST = 40;
const TONES = { finished: "good", refused: "bad", training: "run", stopped: "warn" };

export const panel = {
  on: ["runs"],
  reloads: ({ status }) => status?.state === "running" && status.stage === "train",
  async load(page, signal) {
    const { home, rest, memory } = page;
    const address = (run) => `${homeUrl(home)}/runs/${encodeURIComponent(run)}`;
    if (rest[0]) return { run: await get(address(rest[0]), signal) };
    const runs = await get(`${homeUrl(home)}/runs`, signal);
    if (!memory.picked) memory.chosen = new Set(runs.slice(0, NEWEST).map((one) => one.run)); // until the user selects others
    const curves = {};
    await Promise.all(
      [...memory.chosen].map(async (run) => {
        const finished = runs.find((one) => one.run === run)?.state !== "training";
        const known = memory.curves?.[run];
        curves[run] = known && finished && known.finished ? known : { ...(await get(`${address(run)}/curve`, signal).catch(() => ({}))), finished };
      }),
    );
    memory.curves = { ...memory.curves, ...curves };
    return { runs };
  },
  view(page) {
    if (page.rest[0]) return detail(page);
    const { data, error } = page;
    const problem = error ? failure(error) : null;
    if (!data) return [h("h1", {}, t("panel.runs")), problem || loading()];
    if (!data.runs.length) return [
      h("h1", {}, t("panel.runs")),
      nothing(t("runs.none"), t("runs.none.words"), upCommand(page)),
    ];
    return [h("h1", {}, t("panel.runs")), problem, curvesCard(page), list(page)];
  },
};

function curvesCard(page) {
  const { memory, data } = page;
  const metric = memory.metric || "auc";
  const axis = memory.axis || "rows";
  const plotted = data.runs.filter((one) => memory.chosen.has(one.run));
  const series = plotted.map((one) => {
    const curve = memory.curves?.[one.run] || {};
    return {
      name: one.run,
      tone: toneOf(memory, one.run),
      points: (curve[axis] || []).map((x, n) => [x, curve[metric]?.[n]]).filter(([, y]) => Number.isFinite(y)),
    };
  });
  const best = series.filter((one) => one.points.length).map((one) => [one.points.at(-1)[1], one.name]).sort((a, b) => (metric === "loss" ? a[0] - b[0] : b[0] - a[0]))[0];
  const write = metric === "rows_per_second" ? short : (value) => value.toFixed(4);
  const choose = (key) => (value) => {
    memory[key] = value;
    page.draw();
  };
  return card(
    t("runs.curves"),
    {
      side: [
        choice(t("runs.metric"), { auc: t("auc"), loss: t("loss"), rows_per_second: t("speed.short") }, metric, choose("metric")),
        choice(t("runs.axis"), { rows: t("axis.rows"), seconds: t("axis.seconds") }, axis, choose("axis")),
      ],
    },
    series.some((one) => one.points.length)
      ? lines(
        "runs",
        {
          title: t(metric === "rows_per_second" ? "speed.short" : metric),
          summary: best ? t("runs.best", { run: best[1], value: write(best[0]) }) : "",
          series,
          x: { label: t(`axis.${axis}`), write: axis === "rows" ? short : (value) => duration(value) },
          y: { write: metric === "rows_per_second" ? short : (value) => value.toFixed(3), zero: metric === "rows_per_second" },
          height: "high",
          wide: true,
        },
      )
      : h("p", { class: "dim" }, memory.chosen.size ? t("runs.nocurve") : t("runs.choose")),
  );
}

/** A run keeps its colour while others are added and removed. */
function toneOf(memory, run) {
  memory.tones ||= new Map();
  for (const known of [...memory.tones.keys()]) if (!memory.chosen.has(known)) memory.tones.delete(known);
  if (!memory.tones.has(run)) {
    const taken = new Set(memory.tones.values());
    memory.tones.set(run, [1, 2, 3, 4, 5, 6].map((n) => `s${n}`).find((name) => !taken.has(name)) || "s1");
  }
  return memory.tones.get(run);
}

function list(page) {
  const { memory, data, link } = page;
  const full = memory.chosen.size >= MAX_CURVES;
  const shown = memory.all ? data.runs : data.runs.slice(0, FIRST);
  const toggle = (run) => {
    memory.picked = true;
    memory.chosen.has(run) ? memory.chosen.delete(run) : memory.chosen.add(run);
    page.reload();
    page.draw();
  };
  const columns = [
    {
      plain: true,
      hidden: t("runs.draw"),
      cell: (one) => h(
        "label",
        { class: `pick ${memory.chosen.has(one.run) ? toneOf(memory, one.run) : ""}` },
        h(
          "input",
          {
            type: "checkbox",
            checked: memory.chosen.has(one.run),
            disabled: full && !memory.chosen.has(one.run),
            "aria-label": t("runs.draw.one", { run: one.run }),
            on: { change: () => toggle(one.run) },
          },
        ),
      ),
    },
    { name: t("run"), cell: (one) => h("a", { href: link("runs", one.run) }, one.run) },
    { name: t("state"), cell: (one) => badge(named("run.state", one.state), TONES[one.state]) },
    { name: t("created"), cell: (one) => when(one.created) },
    { name: t("auc"), number: true, cell: (one) => measure(one.auc) },
    { name: t("logloss"), number: true, cell: (one) => measure(one.logloss) },
    { name: t("calibration"), number: true, cell: (one) => measure(one.calibration) },
    { name: t("step"), number: true, cell: (one) => count(one.step) },
    { name: t("report"), cell: (one) => (one.has_report ? reportLink(page, one.run, t("report.open")) : "–") },
  ];
  return card(
    t("runs.list"),
    { note: t("runs.pick", { n: memory.chosen.size, most: MAX_CURVES }) },
    table(t("runs.list"), columns, shown, { key: (one) => one.run }),
    shown.length < data.runs.length ? h(
      "button",
      { type: "button", on: { click: () => ((memory.all = true), page.draw()) } },
      t("show.all", { n: count(data.runs.length) }),
    ) : null,
  );
}

/** The full report of a run in a new tab. A link cannot send the token, so it gets a ticket if reading needs one. */
function reportLink({ home }, run, label) {
  const address = `${homeUrl(home)}/runs/${encodeURIComponent(run)}/report.html`;
  const open = async (event) => {
    if (!token()) return;
    event.preventDefault();
    const ticket = await post("api/ticket", {}).then((response) => `?ticket=${encodeURIComponent(response.ticket)}`, () => "");
    window.open(address + ticket, "_blank", "noopener");
  };
  return h("a", { href: address, target: "_blank", rel: "noopener", "aria-label": `${label}: ${run}`, on: { click: open } }, label);
}

function detail(page) {
  const { data, error, rest, link } = page;
  const run = rest[0];
  const head = h(
    "div",
    { class: "headline" },
    h("p", { class: "crumb" }, h("a", { href: link("runs") }, t("panel.runs"))),
    h("h1", {}, t("run.title", { run })),
  );
  if (!data) return [head, waiting(error)];
  const report = data.run;
  const metrics = report.evaluation || {};
  return [
    head,
    verdict(report),
    figures(
      figure(
        t("auc"),
        measure(metrics.auc),
        { note: metrics.auc_interval ? `${measure(metrics.auc_interval[0])} – ${measure(metrics.auc_interval[1])}` : null },
      ),
      figure(t("logloss"), measure(metrics.logloss)),
      figure(t("calibration"), measure(metrics.calibration)),
      figure(t("rows.measured"), count(metrics.rows)),
      figure(t("base.rate"), percent(metrics.base_rate, 2)),
    ),
    report.has_report === false ? null : h("p", {}, reportLink(page, run, t("report.whole"))),
    h("div", { class: "grid" }, learningCards(report), calibrationCard(report), rocCard(report)),
    h("div", { class: "columns even" }, importanceCard(report), driftCard(report)),
    lineageCard(report, page),
    (report.notes || []).length ? card(t("notes"), {}, h("ul", {}, report.notes.map((note) => h("li", {}, formatText(note))))) : null,
  ];
}

function verdict({ gate }) {
  if (!gate) return null;
  if (gate.passed) return (gate.warnings || []).map((warning) => notice("warn", t("gate.warning"), warning));
  return notice("bad", t("refused.title"), h("ul", {}, (gate.reasons || []).map((reason) => h("li", {}, formatText(reason)))));
}

function learningCards({ learning }) {
  if (!learning?.rows?.length) return null;
  const points = (key) => learning.rows.map((rows, n) => [rows, learning[key]?.[n]]).filter(([, value]) => Number.isFinite(value));
  const chart = (key, tone) => {
    const values = points(key);
    const write = key === "rows_per_second" ? short : (value) => value.toFixed(3);
    const title = t(key === "rows_per_second" ? "speed.short" : key);
    return values.length ? card(
      null,
      { key: `learning-${key}` },
      lines(
        `run-${key}`,
        {
          title,
          summary: t("last.value", { value: key === "rows_per_second" ? short(values.at(-1)[1]) : measure(values.at(-1)[1]) }),
          series: [{ name: title, points: values, tone }],
          x: { label: t("axis.rows"), write: short },
          y: { write, zero: key === "rows_per_second" },
        },
      ),
    ) : null;
  };
  return [chart("auc", "s1"), chart("loss", "s2"), chart("rows_per_second", "s3")];
}

function calibrationCard({ curves, evaluation }) {
  const curve = curves?.calibration;
  if (!curve?.predicted?.length) return null;
  const most = Math.max(...curve.predicted, ...curve.observed, ...(curve.high || []));
  return card(
    null,
    { key: "calibration" },
    lines(
      "run-calibration",
      {
        title: t("calibration.curve"),
        summary: t("calibration.summary", { value: measure(evaluation?.calibration) }),
        series: [
          {
            name: t("calibration.observed"),
            points: curve.predicted.map((x, n) => [x, curve.observed[n]]),
            band: curve.low ? curve.predicted.map((x, n) => [x, curve.low[n], curve.high[n]]) : undefined,
            dots: true,
          },
        ],
        diagonal: true,
        x: { label: t("calibration.predicted"), write: (value) => percent(value, 0), min: 0, max: most },
        y: { write: (value) => percent(value, 0), min: 0, max: most },
      },
    ),
  );
}

function rocCard({ curves, evaluation }) {
  const curve = curves?.roc;
  if (!curve?.false_positive_rate?.length) return null;
  return card(
    null,
    { key: "roc" },
    lines(
      "run-roc",
      {
        title: t("roc"),
        summary: `${t("auc")} ${measure(evaluation?.auc)}`,
        series: [{ name: t("roc.true"), points: curve.false_positive_rate.map((x, n) => [x, curve.true_positive_rate[n]]) }],
        diagonal: true,
        x: { label: t("roc.false"), write: (value) => percent(value, 0), min: 0, max: 1 },
        y: { write: (value) => percent(value, 0), min: 0, max: 1 },
      },
    ),
  );
}

function importanceCard({ importance, importance_rows: rows }) {
  const fields = (Array.isArray(importance) ? importance : []).map((one) => ({ name: one.name, value: one.lost })).filter((one) => one.name && Number.isFinite(one.value));
  if (!fields.length) return null;
  const top = fields.sort((a, b) => b.value - a.value).slice(0, 12).map((one) => ({ ...one, text: signed(one.value) }));
  return card(
    null,
    { key: "importance" },
    bars(
      "run-importance",
      { title: t("importance"), summary: rows ? t("importance.rows", { n: count(rows) }) : "", items: top, head: [t("field"), t("importance")] },
    ),
  );
}

function driftCard({ drift }) {
  const fields = (drift?.fields || []).filter((one) => Number.isFinite(one.psi)).sort((a, b) => b.psi - a.psi).slice(0, 12);
  if (!fields.length) return null;
  return card(
    null,
    { key: "drift" },
    bars(
      "run-drift",
      {
        title: t("drift"),
        summary: t("drift.words"),
        items: fields.map(
          (one) => ({ name: one.name, value: one.psi, text: one.psi.toFixed(3), tone: one.psi > 0.25 ? "bad" : one.psi > 0.1 ? "warn" : "s1" }),
        ),
        max: Math.max(0.25, fields[0].psi),
        head: [t("field"), "PSI"],
      },
    ),
  );
}

function lineageCard(report, { link }) {
  const { lineage = {}, run = {}, epochs = [] } = report;
  const facts = [
    run.created ? [t("created"), moment(run.created)] : null,
    lineage.dataset ? [t("dataset"), `${lineage.dataset.id} · ${t("rows", { n: count(lineage.dataset.train_rows) })}`] : null,
    ...(lineage.dataset?.inputs || []).slice(0, 5).map((input) => [t("input"), h("code", {}, input)]),
    report.checkpoint || lineage.checkpoint ? [t("checkpoint"), plain(lineage.checkpoint?.folder ?? report.checkpoint)] : null,
    lineage.version ? [t("version"), h("a", { href: link("versions") }, String(lineage.version))] : null,
    epochs.length ? [t("epochs"), epochs.map((one) => `${one.epoch}: ${t("auc")} ${measure(one.auc)}`).join(", ")] : null,
  ].filter(Boolean);
  return facts.length ? card(t("lineage"), {}, pairs(facts)) : null;
}
