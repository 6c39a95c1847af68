// The overview panel: the state of the pipeline, its metrics, and what to do after a failure.

import { get, homeUrl } from "./api.js";
import { lines, sparkline } from "./charts.js";
import { formatText, h } from "./dom.js";
import { count, duration, measure, milliseconds, moment, percent, secondsSince, short, size } from "./format.js";
import { badge, card, copier, figure, figures, nothing, notice, pairs, progress, upCommand } from "./parts.js";
import { named, t } from "./words.js";

const MARKS = { waiting: "·", running: "●", done: "✓", skipped: "=", refused: "✗", failed: "✗", stopped: "■" };
const TONES = { running: "run", done: "good", skipped: "good", refused: "bad", failed: "bad", stopped: "warn" };

export const panel = {
  on: ["runs", "versions"],
  reloads: ({ status }) => status?.state === "running" && status.stage === "train",
  async load({ home, data }, signal) {
    const [runs, serving] = await Promise.all([get(`${homeUrl(home)}/runs`, signal), get(`${homeUrl(home)}/serving`, signal)]);
    const newest = runs[0] ?? null;
    const curve = newest ? await get(`${homeUrl(home)}/runs/${encodeURIComponent(newest.run)}/curve`, signal).catch(() => null) : null;
    return { newest, curve: curve ?? data?.curve ?? null, serving };
  },
  view(page) {
    const { status } = page;
    if (status.state === "never" && !status.cluster) return [notices(page), empty(page)];
    return [
      h("div", { class: "headline" }, h("h1", {}, formatText(headline(status))), h("p", { class: "dim" }, subline(status))),
      notices(page),
      keyFigures(page),
      h("div", { class: "columns" }, h("div", { class: "stack" }, stages(page), endpoint(page)), learning(page)),
    ];
  },
};

const empty = (page) =>
  [
    h("h1", { class: "unseen" }, t("panel.overview")),
    nothing(
      t("never.title", { home: page.status.home }),
      t("never.words"),
      upCommand(page),
      h("p", { class: "dim" }, t("never.more")),
    ),
  ];

const isUnready = ({ state, stages, health }) => state === "running" && stages?.serve?.state === "running" && Boolean(health) && health !== "ready";

function headline(status) {
  const name = status.name;
  const serve = status.stages?.serve;
  const version = status.versions?.current ?? serve?.facts?.version;
  if (status.state === "running") {
    if (isUnready(status)) return t("headline.unready", { name });
    if (status.stage && status.stage !== "serve" && status.stage !== "follow") return t(
      "headline.stage",
      { name, stage: named("stage.doing", status.stage) },
    );
    if (status.follow) return t(version ? "headline.following" : "headline.following.first", { name, version });
    if (serve?.state === "running" && version) return t("headline.serving", { name, version });
    return t("headline.running", { name });
  }
  const stage = status.stage ? named("stage", status.stage) : "";
  if (status.state === "failed" && status.stages?.gate?.state === "refused") return t("headline.refused", { name });
  if (["failed", "stopped", "lost"].includes(status.state) && stage) return t(`headline.${status.state}.in`, { name, stage });
  return named("headline", status.state).replace("{name}", name);
}

function subline(status) {
  const since = status.since ? t(
    "since",
    { time: moment(status.since), age: duration(secondsSince(status.since, status.ended ? Date.parse(status.ended) : undefined)) },
  ) : "";
  return status.ended ? t("ran", { time: moment(status.ended), age: duration(secondsSince(status.since, Date.parse(status.ended))) }) : since;
}

function notices({ status, link, about }) {
  const shown = [];
  const gate = status.stages?.gate;
  const up = `clickline up${status.follow ? " --follow" : ""} -c ${about?.config ?? "clickline.yaml"}`;
  const log = (stage) => h("p", {}, h("a", { href: link("log", stage) }, t("log.of", { stage: named("stage", stage) })));
  if (gate?.state === "refused") {
    const reasons = h("ul", {}, (gate.facts.reasons || []).map((reason) => h("li", {}, formatText(reason))));
    shown.push(notice("bad", t("refused.title"), reasons, t("refused.words")));
  } else if (status.error) {
    shown.push(
      notice(
        "bad",
        t("failed.title", { stage: status.stage ? named("stage", status.stage) : "up" }),
        status.error.message || "",
        log(status.stage || "up"),
        h("p", {}, t("again.words"), " ", h("code", {}, up)),
      ),
    );
  } else if (status.state === "failed") {
    shown.push(notice("bad", t("failed.title", { stage: status.stage ? named("stage", status.stage) : "up" }), log(status.stage || "up")));
  }
  if (status.state === "lost") shown.push(
    notice(
      "bad",
      t("vanished.title"),
      t("vanished.words", { time: moment(status.updated) }),
      h("p", {}, t("again.words"), " ", h("code", {}, up)),
      log(status.stage || "up"),
    ),
  );
  if (status.state === "stopped") shown.push(notice("info", t("stopped.title"), h("p", {}, t("again.words"), " ", h("code", {}, up))));
  if (isUnready(status)) shown.push(notice("bad", t("unready.title"), status.health, log("serve")));
  const follow = status.stages?.follow?.facts;
  if (follow?.trouble) shown.push(notice("warn", t("trouble.title", { what: follow.trouble.what }), follow.trouble.words));
  if (follow?.late && status.state === "running") shown.push(notice(
    "warn",
    t("late.title", { hour: follow.hour }),
    t("late.words", { time: moment(follow.waiting_since) }),
  ));
  if (status.note) shown.push(notice("warn", t("note.title"), status.note));
  if (status.versions?.error) shown.push(notice("warn", t("registry.title"), status.versions.error));
  for (const warning of gate?.facts?.warnings || []) shown.push(notice("warn", t("gate.warning"), warning));
  return shown;
}

function keyFigures({ status, data }) {
  const { metrics = {}, versions, work } = status;
  const history = data?.serving?.alive ? data.serving.history : [];
  const newest = history.at(-1);
  const slow = history.findLast((one) => Number.isFinite(one.p99_ms));
  const live = versions?.newest?.find((one) => one.version === versions.current);
  if (status.state === "running" && status.stage === "train") {
    const last = (key) => measure(data?.curve?.[key]?.at(-1));
    return figures(
      figure(t("far"), Number.isFinite(work?.share) ? percent(work.share, 0) : "–"),
      figure(t("time.left"), Number.isFinite(work?.seconds_left) ? duration(work.seconds_left) : "–"),
      figure(t("speed.short"), work ? count(work.rows_per_second) : "–"),
      figure(t("auc"), last("auc"), { note: t("so.far") }),
      figure(t("loss"), last("loss"), { note: t("so.far") }),
      figure(t("live.version"), versions?.current ?? "–"),
    );
  }
  if (status.state !== "running" && !Object.keys(metrics).length && !versions?.current) return null; // nothing to show yet
  return figures(
    figure(t("auc"), measure(metrics.auc)),
    figure(t("logloss"), measure(metrics.logloss)),
    figure(t("calibration"), measure(metrics.calibration)),
    figure(
      t("live.version"),
      versions?.current ?? "–",
      {
        note: versions?.pinned ? t("pinned") : live ? named("table", live.table) : versions?.count ? t(
          "versions.count",
          { n: count(versions.count) },
        ) : null,
      },
    ),
    figure(
      t("qps"),
      newest ? short(newest.qps) : "–",
      { spark: history.length > 1 ? sparkline(history.map((one) => [Date.parse(one.at), one.qps]), t("qps")) : null },
    ),
    figure(t("p99"), milliseconds(slow?.p99_ms)),
  );
}

function stages(page) {
  const { status, link } = page;
  const all = Object.entries(status.stages || {});
  return card(
    t("stages"),
    { class: "stages-card" },
    h(
      "ol",
      { class: "stages" },
      all.map(([name, stage]) => {
        const running = stage.state === "running" && status.state === "running";
        const text = stageText(name, stage, status);
        return h(
          "li",
          { key: name, class: `stage ${stage.state}`, "aria-current": running && name === status.stage ? "step" : null },
          h("span", { class: `mark ${TONES[stage.state] || ""}`, "aria-hidden": "true" }, MARKS[stage.state] ?? "·"),
          h(
            "div",
            { class: "stage-body" },
            h(
              "div",
              { class: "stage-line" },
              h("a", { class: "stage-name", href: link("log", name) }, named("stage", name)),
              h("span", { class: "unseen" }, named("state", stage.state)),
              h("span", { class: "stage-words" }, formatText(text)),
            ),
            running && name === status.stage && status.work ? workProgress(status.work, named("stage", name)) : null,
          ),
          h("span", { class: "stage-time" }, stageTime(stage, status)),
        );
      }),
    ),
  );
}

function stageTime(stage, status) {
  if (!stage.since || stage.state === "skipped") return "";
  const end = stage.ended ? Date.parse(stage.ended) : status.state === "running" ? undefined : Date.parse(status.updated || status.ended);
  const seconds = secondsSince(stage.since, end);
  return seconds < 0.05 ? "" : duration(seconds < 10 && !stage.ended ? Math.floor(seconds * 10) / 10 : seconds);
}

function workProgress(work, label) {
  const parts = [work.title];
  if (work.rows) parts.push(t("work.rows", { rows: count(work.rows), speed: count(work.rows_per_second) }));
  if (work.bytes) parts.push(`${size(work.bytes)}, ${size(work.bytes_per_second)}/s`);
  if (Number.isFinite(work.share)) parts.push(`${Math.round(100 * work.share)} %`);
  if (Number.isFinite(work.seconds_left)) parts.push(t("work.left", { time: duration(work.seconds_left) }));
  return h(
    "div",
    { class: "working" },
    progress(work.share, label),
    h("p", { class: "working-words" }, parts.join(" · ")),
    work.note ? h("p", { class: "working-words" }, work.note) : null,
  );
}

/** The summary of a stage in its state; unknown facts of another release are shown unchanged. */
function stageText(name, stage, status) {
  const facts = stage.facts || {};
  if (stage.state === "waiting") return "";
  if (facts.reason) return String(facts.reason).split("\n")[0];
  if (stage.state === "refused") return (facts.reasons || []).join(" ");
  const text = STAGE_TEXTS[name]?.(facts, status) ?? "";
  if (stage.state === "skipped") return text ? t("skipped.words", { words: text }) : t("skipped");
  return text && stage.rows_per_second ? `${text}, ${t("speed", { n: count(stage.rows_per_second) })}` : text;
}

const STAGE_TEXTS = {
  prepare: (facts) => ("train_rows" in facts ? t(
    "prepare.words",
    { train: count(facts.train_rows), eval: count(facts.eval_rows) },
  ) + (facts.bad_rows ? `, ${t("prepare.bad", { n: count(facts.bad_rows) })}` : "") : ""),
  train: (facts) => ("steps" in facts ? t("train.words", { n: count(facts.steps) }) : ""),
  evaluate: (facts) => ["auc", "logloss", "calibration"].filter((key) => Number.isFinite(facts[key])).map((key) => `${t(key)} ${measure(facts[key])}`).join(", ") || ("report" in facts ? t("evaluate.nothing") : ""),
  gate: (facts) => (facts.passed ? (facts.hour ? t("gate.passed.hour", { hour: facts.hour }) : t("gate.passed")) : ""),
  publish: (facts) => ("version" in facts ? [
    t("publish.words", { version: facts.version, table: named("table", facts.table) }),
    facts.hour,
    facts.rows === undefined ? "" : t("rows", { n: count(facts.rows) }),
    facts.current === false ? t("publish.waits") : "",
  ].filter(Boolean).join(", ") : ""),
  follow: (facts) => {
    const parts = [];
    if (facts.state === "waiting" && facts.hour) parts.push(t("follow.waiting", { hour: facts.hour }));
    else if (facts.hour) parts.push(t("follow.learning", { hour: facts.hour }));
    if (facts.hours_learned) parts.push(t("follow.learned", { n: count(facts.hours_learned) }));
    if (facts.last?.rows !== undefined) parts.push(t(
      "follow.last",
      { hour: facts.last.hour, rows: count(facts.last.rows), auc: measure(facts.last.progressive?.auc) },
    ));
    return parts.join("; ");
  },
  serve: (facts) => ("grpc" in facts ? t("serve.words", { version: facts.version ?? "–", grpc: facts.grpc }) : String(facts.state ?? "")),
};

function learning({ data, status, link }) {
  const curve = data?.curve;
  if (!(curve?.rows?.length > 1)) return null;
  const points = (key) => curve.rows.map((rows, n) => [rows, curve[key]?.[n]]).filter(([, value]) => Number.isFinite(value));
  const auc = points("auc");
  const live = status.stage === "train" && status.state === "running";
  const last = auc.at(-1)?.[1];
  return card(
    t("learning.title"),
    { side: [live ? badge(t("live"), "run") : null, h("a", { href: link("runs", data.newest.run) }, t("learning.run", { run: data.newest.run }))] },
    lines(
      "overview-auc",
      {
        title: t("auc"),
        summary: t("learning.summary", { auc: measure(last), rows: short(curve.rows.at(-1)) }),
        series: [{ name: t("auc"), points: auc }],
        x: { label: t("axis.rows"), write: short },
        y: { write: (value) => value.toFixed(3) },
        height: "low",
      },
    ),
    lines(
      "overview-loss",
      {
        title: t("loss"),
        summary: t("learning.loss", { loss: measure(points("loss").at(-1)?.[1]) }),
        series: [{ name: t("loss"), points: points("loss"), tone: "s2" }],
        x: { label: t("axis.rows"), write: short },
        y: { write: (value) => value.toFixed(3) },
        height: "low",
      },
    ),
  );
}

function endpoint({ status }) {
  const facts = status.stages?.serve?.facts;
  const roles = {};
  for (const one of status.processes || []) (roles[one.role] ||= []).push(one.pid);
  const open = facts?.grpc && status.state === "running";
  const rows = [
    ...(open ? [
      ["gRPC", facts.grpc],
      ["HTTP", facts.http],
      [t("endpoint.metrics"), facts.metrics],
    ].map(([name, address]) => [name, h("span", { class: "address" }, h("code", {}, address), copier(address))]) : []),
    open ? [t("endpoint.health"), status.health === "ready" ? badge(t("ready"), "good") : status.health ?? "–"] : null,
    Object.keys(roles).length ? [
      t("processes"),
      Object.entries(roles).map(([role, pids]) => h("span", { class: "pids" }, `${role} ${pids.join(" ")}`)),
    ] : null,
    [t("home"), h("code", {}, status.home)],
    [t("logs"), h("code", {}, status.logs)],
  ].filter(Boolean);
  return card(
    open ? t("endpoint") : t("place"),
    {},
    pairs(rows),
    open && facts.curl ? h(
      "div",
      { class: "curl" },
      h("pre", { class: "command", tabindex: "0", "aria-label": t("endpoint.curl") }, facts.curl),
      copier(facts.curl),
    ) : null,
  );
}
