// Routing, state and rendering. A panel declares the data it needs and how it looks.

import { events, get } from "./api.js";
import { askToken } from "./dialogs.js";
import { formatText, h, render } from "./dom.js";
import { arrows, loading, notice } from "./parts.js";
import { LANGUAGES, language, loadTexts, named, preferred, remember, remembered, t } from "./words.js";

const FILES = {
  overview: "overview",
  runs: "runs",
  versions: "versions",
  serving: "serving",
  data: "data",
  cluster: "cluster",
  try: "tryit",
  log: "log",
};
const PANELS = {}; // loaded panels: the first one at once, the others when idle
const POINTS = 300;

const state = { homes: null, home: null, panel: "overview", rest: [], status: null, connection: "connecting", error: null };
let results = {}; // place -> {data, error}
let panelMemory = {}; // panel -> its state while the page is open
let stream = null;
let requests = {}; // place -> {aborter, repeat}
let frame = 0;
let shownPlace = null;

// ── what panels get ────────────────────────────────────────────────────────────────────────────

/** The current panel and its arguments. */
const place = () => [state.panel, ...state.rest].join("/");

function context() {
  panelMemory[state.panel] ||= {};
  const { home, status, rest, connection } = state;
  return {
    home,
    about: state.homes?.find((one) => one.id === home),
    status,
    rest,
    connection,
    memory: panelMemory[state.panel],
    data: results[place()]?.data,
    error: results[place()]?.error,
    link: (...parts) => `#/${[home, ...parts].map(encodeURIComponent).join("/")}`,
    draw,
    reload: load,
    announce: (message) => (document.getElementById("announcement").textContent = message),
  };
}

/** Fetch the data of the panel; the old data stays until then. */
async function load() {
  const panel = PANELS[state.panel];
  if (!panel?.load || !state.home) return;
  const here = place();
  if (requests[here]) {
    requests[here].repeat = true; // the running request may be older than this event
    return;
  }
  const request = (requests[here] = { aborter: new AbortController(), repeat: false });
  try {
    const data = await panel.load(context(), request.aborter.signal);
    if (requests[here] === request) results[here] = { data };
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.status === 401) requestToken();
    if (requests[here] === request) results[here] = { data: results[here]?.data, error };
  } finally {
    if (requests[here] === request) delete requests[here];
  }
  draw();
  if (request.repeat && here === place()) load();
}

// ── routes ─────────────────────────────────────────────────────────────────────────────────────

function route() {
  if (location.hash && !location.hash.startsWith("#/")) return; // the skip link
  const [home, panel, ...rest] = location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);
  const known = state.homes?.some((one) => one.id === home) ? home : state.homes?.[0]?.id ?? null;
  const before = { ...state };
  state.panel = panel in FILES ? panel : "overview";
  state.rest = panel in FILES ? rest : [];
  if (known !== state.home) openHome(known);
  if (before.home && (before.panel !== state.panel || before.home !== state.home || before.rest.join() !== state.rest.join())) window.scrollTo(0, 0);
  if (state.panel in PANELS) load();
  else fetchPanel(state.panel).then(load).then(draw, draw);
  draw();
}

const fetchPanel = async (name) => (PANELS[name] ??= (await import(`./${FILES[name]}.js`)).panel);

function openHome(home) {
  stream?.close();
  for (const one of Object.values(requests)) one.aborter.abort();
  Object.assign(state, { home, status: null, connection: "connecting" });
  results = {};
  panelMemory = {};
  requests = {};
  if (home) stream = events(home, { event: onEvent, state: onConnection });
}

function onEvent(name, data) {
  let stageChanged = false; // a stage started or ended: every panel may change
  if (name === "status") {
    announceStages(state.status, data);
    stageChanged = Boolean(state.status) && ["state", "stage", "health"].some((key) => state.status[key] !== data[key]);
    state.status = data;
  }
  if (name === "serving") {
    for (const one of Object.values(results)) {
      const serving = one.data?.serving;
      if (serving && serving.history.at(-1)?.at !== data.at) Object.assign(
        serving,
        { alive: true, history: [...serving.history, data].slice(-POINTS) },
      );
    }
  }
  if (stageChanged || (name !== "serving" && PANELS[state.panel]?.on?.includes(name))) load();
  draw();
}

/** Announce to screen readers only that a stage started or ended. */
function announceStages(before, now) {
  if (!before) return;
  for (const [name, stage] of Object.entries(now.stages || {})) {
    if ((before.stages || {})[name]?.state !== stage.state) context().announce(`${named("stage", name)}: ${named("state", stage.state)}`);
  }
}

function onConnection(now, retryAt) {
  const reconnected = now === "live" && state.connection === "lost";
  state.connection = now;
  state.retryAt = retryAt;
  if (now === "refused") requestToken();
  if (reconnected) route(); // reload: anything may have changed meanwhile
  draw();
}

let asking = false;

async function requestToken() {
  if (asking) return;
  asking = true;
  const given = await askToken(() => get("api/homes"));
  asking = false;
  if (given) start();
  else if (!state.homes) {
    state.error = t("token.words"); // instead of a page that seems to load forever
    draw();
  }
}

// ── drawing ────────────────────────────────────────────────────────────────────────────────────

function draw() {
  if (!frame) frame = requestAnimationFrame(redraw);
}

function redraw() {
  frame = 0;
  document.getElementById("skip").textContent = t("skip");
  render(document.getElementById("top"), top());
  render(document.getElementById("banner"), banner());
  render(document.getElementById("main"), body());
  document.title = title();
  if (shownPlace !== place()) {
    shownPlace = place();
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

function top() {
  const home = state.homes?.find((one) => one.id === state.home);
  const several = (state.homes?.length ?? 0) > 1;
  return [
    h(
      "div",
      { class: "bar" },
      h(
        "a",
        { class: "brand", href: state.home ? context().link() : "#/" },
        h("img", { src: "icon.svg", alt: "", width: "22", height: "22" }),
        "Clickline",
      ),
      several
        ? h(
            "select",
            {
              class: "home",
              "aria-label": t("home"),
              on: {
                change: (event) => (location.hash = `#/${encodeURIComponent(event.target.value)}/${state.panel === "log" ? "overview" : state.panel}`),
              },
            },
            state.homes.map((one) => h("option", { value: one.id, key: one.id, selected: one.id === state.home }, one.name)),
          )
        : h("span", { class: "home" }, home?.name ?? ""),
      h("span", { class: `connection ${state.connection}` }, t(`connection.${state.connection}`)),
      h(
        "div",
        { class: "tools" },
        h(
          "button",
          {
            type: "button",
            class: "quiet",
            lang: language() === "zh" ? "en" : "zh-CN",
            on: { click: () => changeLanguage(language() === "zh" ? "en" : "zh") },
          },
          LANGUAGES[language() === "zh" ? "en" : "zh"],
        ),
        h(
          "button",
          { type: "button", class: "quiet", "aria-label": t("theme", { name: t(`theme.${theme()}`) }), on: { click: changeTheme } },
          t(`theme.${theme()}`),
        ),
      ),
    ),
    state.home
      ? h(
          "nav",
          { "aria-label": t("nav"), on: { keydown: arrows } },
          ["overview", "runs", "versions", "serving", "data", "cluster", "try"]
            .filter((name) => name !== "cluster" || state.status?.cluster || state.panel === "cluster")
            .map(
              (name) => h("a", { key: name, href: context().link(name), "aria-current": name === state.panel ? "page" : null }, t(`panel.${name}`)),
            ),
        )
      : null,
  ];
}

function banner() {
  if (state.connection !== "lost") return null;
  return h(
    "div",
    { class: "notice bad lost" },
    h("strong", {}, t("lost.title")),
    h("span", {}, formatText(t("lost.words"))),
    h("button", { type: "button", on: { click: () => (state.homes ? stream?.reconnect() : start()) } }, t("lost.again")),
  );
}

function body() {
  if (state.error) return notice("bad", t("error.title"), state.error);
  if (!state.homes) return loading();
  if (!state.home) return notice("info", t("homes.none"), t("homes.none.words"));
  const now = context();
  if (!(state.panel in PANELS) || (!state.status && state.panel === "overview")) return loading();
  return h("div", { class: `panel ${state.panel}`, key: `${state.home}/${state.panel}/${state.rest.join("/")}` }, PANELS[state.panel].view(now));
}

function title() {
  const home = state.homes?.find((one) => one.id === state.home);
  const share = state.status?.work?.share;
  const progress = state.status?.state === "running" && Number.isFinite(share) ? `${Math.round(100 * share)} % · ` : "";
  return home ? `${progress}${home.name} · ${t(`panel.${state.panel}`)} · Clickline` : "Clickline";
}

// ── switches ───────────────────────────────────────────────────────────────────────────────────

const theme = () => remembered("clickline.theme") || "system";

function changeTheme() {
  const next = { system: "light", light: "dark", dark: "system" }[theme()];
  remember("clickline.theme", next === "system" ? null : next);
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  draw();
}

async function changeLanguage(name) {
  remember("clickline.language", name);
  await loadTexts(name);
  draw();
}

// ── start ──────────────────────────────────────────────────────────────────────────────────────

async function start() {
  try {
    state.homes = await get("api/homes");
    state.error = null;
    state.home = null;
    state.connection = "connecting";
    route();
  } catch (error) {
    if (error.status === 401) requestToken();
    else if (error.status) state.error = error.message;
    else {
      state.connection = "lost";
      setTimeout(start, 2000);
    }
    draw();
  }
}

window.addEventListener("hashchange", route);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.nodeName)) return;
  const search = document.querySelector("main input[type=search]");
  if (!search || document.querySelector("dialog")) return;
  event.preventDefault();
  search.focus();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
setInterval(() => {
  if (document.hidden) return;
  const panel = PANELS[state.panel];
  if (panel?.reloads?.(context())) load();
  if (state.panel === "overview" || Math.floor(Date.now() / 1000) % 10 === 0) draw(); // ages and running times
}, 1000);

await loadTexts(preferred());
await start();
setTimeout(() => Promise.allSettled(Object.keys(FILES).map(fetchPanel)), 500);
