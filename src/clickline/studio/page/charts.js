// Small SVG charts that fit any width: shapes in per cent, strokes and text in pixels.
// Each has a caption with the key number, a legend with the values under the pointer, and a table view.

import { h, morph, s } from "./dom.js";
import { t } from "./words.js";

const asTable = new Set(); // ids of charts that are shown as a table
const pointed = new Map(); // id -> x under the pointer

/** Round steps between two values; about `wanted` of them. */
export function ticks(low, high, wanted = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.75);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(Number((n * step).toPrecision(12)));
  return found;
}

function range(values, { min, max, zero } = {}) {
  const found = values.filter(Number.isFinite);
  let low = min ?? Math.min(...found, ...(zero ? [0] : []));
  let high = max ?? Math.max(...found, ...(zero ? [0] : []));
  if (!found.length) [low, high] = [min ?? 0, max ?? 1];
  if (low === high) {
    const room = Math.abs(low) * 0.05 || 1;
    if (min === undefined && !(zero && low === 0)) low -= room;
    if (max === undefined) high += room;
  } else {
    const room = (high - low) * 0.06;
    if (min === undefined && !(zero && low >= 0)) low -= room;
    if (max === undefined) high += room;
  }
  return [low, high];
}

const at = (value, [low, high]) => (100 * (value - low)) / (high - low || 1);
const pc = (value) => `${Number(value.toFixed(3))}%`;

/** The frame of every chart: caption, plot, and the same data as a table. */
function figure(id, { title, summary, table, wide, pointing }, draw) {
  const build = () => {
    const tabular = asTable.has(id);
    return h(
      "figure",
      { class: wide ? "chart wide" : "chart", key: `chart-${id}`, "data-chart": id },
      h(
        "figcaption",
        {},
        h("span", { class: "chart-title" }, title),
        summary ? h("span", { class: "chart-summary" }, pointing?.() ?? summary) : null,
        table
          ? h(
              "button",
              {
                type: "button",
                class: "quiet",
                "aria-pressed": String(tabular),
                "aria-label": `${t("chart.table")}: ${title}`,
                on: {
                  click: () => {
                    tabular ? asTable.delete(id) : asTable.add(id);
                    redraw();
                  },
                },
              },
              t("chart.table"),
            )
          : null,
      ),
      tabular && table ? plainTable(title, table()) : draw(redraw),
    );
  };
  const redraw = () => {
    const shown = document.querySelector(`[data-chart="${CSS.escape(id)}"]`);
    if (shown) morph(shown, build());
  };
  return build();
}

function plainTable(title, { head, rows }) {
  return h(
    "div",
    { class: "scroll chart-table", tabindex: "0", role: "region", "aria-label": title },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h(
        "tbody",
        {},
        rows.map((row) => h("tr", {}, row.map((cell, n) => (n ? h("td", { class: "number" }, cell) : h("th", { scope: "row" }, cell))))),
      ),
    ),
  );
}

/**
 * Lines over a common x. series: [{name, points: [[x, y]…], tone?, band?: [[x, low, high]…], dots?}].
 * x, y: {label?, write(value), min?, max?, zero?, ticks?}.
 */
export function lines(id, { title, summary, series, x, y, diagonal, height = "", wide }) {
  const xs = series.flatMap((one) => one.points.map((point) => point[0]));
  const ys = series.flatMap((one) => [...one.points.map((point) => point[1]), ...(one.band || []).flatMap((point) => point.slice(1))]);
  const xr = range(xs, { min: x.min ?? (xs.length ? Math.min(...xs) : 0), max: x.max ?? (xs.length ? Math.max(...xs) : 1) });
  const yr = range(ys, y);
  const steps = () => [...new Set(xs)].sort((a, b) => a - b);

  const table = () => ({
    head: [x.label || "x", ...series.map((one) => one.name)],
    rows: steps().map((step) => [x.write(step), ...series.map((one) => valueAt(one, step, y))]),
  });

  const near = () => (pointed.has(id) ? closest(steps(), pointed.get(id)) : undefined);
  const pointing = () => (series.length === 1 && near() !== undefined ? `${x.write(near())}: ${valueAt(series[0], near(), y)}` : null);

  const draw = (redraw) => {
    const nearest = near();
    return h(
      "div",
      { class: "plot-frame" },
      series.length > 1 ? legend(series, nearest, x, y) : null,
      h(
        "div",
        { class: `plot ${height}` },
        yAxis(yr, y),
        s(
          "svg",
          {
            class: "area",
            role: "img",
            "aria-label": [title, summary].filter(Boolean).join(": "),
            on: {
              pointermove: (event) => {
                const box = event.currentTarget.getBoundingClientRect();
                pointed.set(id, xr[0] + ((event.clientX - box.left) / box.width) * (xr[1] - xr[0]));
                redraw();
              },
              pointerleave: () => {
                pointed.delete(id);
                redraw();
              },
            },
          },
          s("rect", { class: "ground", width: "100%", height: "100%" }),
          ticks(...yr, y.ticks ?? 4).map((value) => s(
            "line",
            { class: "grid", x1: "0", x2: "100%", y1: pc(100 - at(value, yr)), y2: pc(100 - at(value, yr)) },
          )),
          diagonal ? s("line", { class: "diagonal", x1: pc(at(yr[0], xr)), y1: "100%", x2: pc(at(yr[1], xr)), y2: "0%" }) : null,
          s(
            "svg",
            { viewBox: "0 0 100 100", preserveAspectRatio: "none", width: "100%", height: "100%", overflow: "visible" },
            series.map((one, n) => (one.band ? s("path", { class: `band ${tone(one, n)}`, d: bandPath(one.band, xr, yr) }) : null)),
            series.map((one, n) => s("path", { class: `line ${tone(one, n)}`, d: path(one.points, xr, yr) })),
          ),
          series.map(
            (one, n) => (one.dots || one.points.length === 1 ? one.points.map(([px, py]) => s(
              "circle",
              { class: `dot ${tone(one, n)}`, cx: pc(at(px, xr)), cy: pc(100 - at(py, yr)), r: "3" },
            )) : null),
          ),
          nearest === undefined ? null : s("line", { class: "cursor", x1: pc(at(nearest, xr)), x2: pc(at(nearest, xr)), y1: "0", y2: "100%" }),
        ),
        xAxis(xr, x),
      ),
      x.label ? h("p", { class: "x-label" }, x.label) : null,
    );
  };
  return figure(id, { title, summary, table, wide, pointing }, draw);
}

const tone = (one, n) => one.tone || `s${(n % 6) + 1}`;

function legend(series, nearest, x, y) {
  return h(
    "ul",
    { class: "legend" },
    series.map((one, n) =>
      h(
        "li",
        {},
        s(
          "svg",
          { class: "swatch", width: "14", height: "10", "aria-hidden": "true" },
          s("line", { class: `line ${tone(one, n)}`, x1: "1", x2: "13", y1: "5", y2: "5" }),
        ),
        h("span", { class: "legend-name" }, one.name),
        h("span", { class: "legend-value" }, nearest === undefined ? lastValue(one, y) : valueAt(one, nearest, y)),
      ),
    ),
    nearest === undefined ? null : h("li", { class: "at" }, x.write(nearest)),
  );
}

function lastValue(one, y) {
  const found = one.points.findLast((point) => Number.isFinite(point[1]));
  return found ? y.write(found[1]) : "–";
}

function valueAt(one, step, y) {
  const found = one.points.find((point) => point[0] === step);
  if (found) return Number.isFinite(found[1]) ? y.write(found[1]) : "–";
  if (!one.points.length || step < one.points[0][0] || step > one.points.at(-1)[0]) return "–";
  return y.write(one.points[one.points.findIndex((point) => point[0] > step) - 1][1]); // of the point before
}

const closest = (steps, value) => steps.reduce((best, step) => (Math.abs(step - value) < Math.abs(best - value) ? step : best), steps[0]);

function path(points, xr, yr) {
  let pen = "M";
  let drawn = "";
  for (const [px, py] of points) {
    if (!Number.isFinite(py)) {
      pen = "M";
      continue;
    }
    drawn += `${pen}${at(px, xr).toFixed(2)} ${(100 - at(py, yr)).toFixed(2)}${pen === "M" ? "h0" : ""}`; // a lone point is a dot
    pen = "L";
  }
  return drawn;
}

function bandPath(band, xr, yr) {
  const up = band.map(([px, , high]) => `${at(px, xr).toFixed(2)} ${(100 - at(high, yr)).toFixed(2)}`);
  const down = band.map(([px, low]) => `${at(px, xr).toFixed(2)} ${(100 - at(low, yr)).toFixed(2)}`).reverse();
  return up.length ? `M${[...up, ...down].join("L")}Z` : "";
}

const yAxis = (yr, y) =>
  s(
    "svg",
    { class: "y-axis", "aria-hidden": "true" },
    ticks(...yr, y.ticks ?? 4).map(
      (value) => s("text", { x: "100%", dx: "-6", y: pc(100 - at(value, yr)), dy: "4", "text-anchor": "end" }, y.write(value)),
    ),
  );

function xAxis(xr, x) {
  const found = x.places || ticks(...xr, x.ticks ?? 5);
  return s(
    "svg",
    { class: "x-axis", "aria-hidden": "true" },
    found.map((value, n) => {
      const place = at(value, xr);
      const inner = n > 0 && n < found.length - 1 && x.write(value).length > 8; // omitted if there is little room
      return s(
        "text",
        { class: inner ? "inner" : null, x: pc(place), y: "14", "text-anchor": place < 4 ? "start" : place > 96 ? "end" : "middle" },
        x.write(value),
      );
    }),
  );
}

/** Points in time; items: [{x, y, shape: "square" | "round", tone, name, chosen}] and what happens when one is chosen. */
export function timeline(id, { title, summary, items, x, y, table, choose, keys }) {
  const xr = range(items.map((one) => one.x), {});
  const yr = range(items.map((one) => one.y), y);
  const draw = () =>
    h(
      "div",
      { class: "plot-frame" },
      h(
        "ul",
        { class: "legend" },
        keys.map(
          (key) => h(
            "li",
            {},
            s("svg", { class: "swatch", width: "14", height: "12", "aria-hidden": "true" }, shape(key, "7", "6", 4)),
            h("span", { class: "legend-name" }, key.name),
          ),
        ),
      ),
      h(
        "div",
        { class: "plot" },
        yAxis(yr, y),
        s(
          "svg",
          { class: "area", role: "img", "aria-label": [title, summary].filter(Boolean).join(": ") },
          s("rect", { class: "ground", width: "100%", height: "100%" }),
          ticks(...yr, 4).map((value) => s("line", { class: "grid", x1: "0", x2: "100%", y1: pc(100 - at(value, yr)), y2: pc(100 - at(value, yr)) })),
          s(
            "svg",
            { viewBox: "0 0 100 100", preserveAspectRatio: "none", width: "100%", height: "100%", overflow: "visible" },
            s("path", { class: "line faint", d: path(items.filter((one) => Number.isFinite(one.y)).map((one) => [one.x, one.y]), xr, yr) }),
          ),
          items
            .filter((one) => Number.isFinite(one.y))
            .map((one) => {
              const radius = one.chosen ? 6 : items.length > 120 ? 3 : 4.5;
              return shape(one, pc(at(one.x, xr)), pc(100 - at(one.y, yr)), radius, choose ? { click: () => choose(one) } : {});
            }),
        ),
        xAxis(xr, x),
      ),
      x.label ? h("p", { class: "x-label" }, x.label) : null,
    );
  return figure(id, { title, summary, table, wide: true }, draw);
}

function shape(one, cx, cy, radius, on = {}) {
  const drawn = { class: `point ${one.tone || "s1"}`, on };
  const title = s("title", {}, one.name);
  if (one.shape !== "square") return s("circle", { ...drawn, cx, cy, r: radius }, title);
  const side = { width: 2 * radius, height: 2 * radius, transform: `translate(${-radius} ${-radius})` };
  return s("rect", { ...drawn, ...side, x: cx, y: cy }, title);
}

/** Horizontal bars, to the right; with `diverging` to both sides of nothing. items: [{name, value, text, tone?, note?}] */
export function bars(id, { title, summary, items, diverging, max, head, wide }) {
  const most = max ?? Math.max(...items.map((one) => Math.abs(one.value) || 0), 1e-12);
  const draw = () =>
    h(
      "ul",
      { class: "bars" },
      items.map((one) => {
        const share = Math.min(1, Math.abs(one.value) / most);
        const [x, width] = diverging ? (one.value < 0 ? [50 - 50 * share, 50 * share] : [50, 50 * share]) : [0, 100 * share];
        return h(
          "li",
          { key: one.name },
          h("span", { class: "bar-name", title: one.note || one.name }, one.name, one.note ? h("small", {}, ` ${one.note}`) : null),
          s(
            "svg",
            { class: "bar", "aria-hidden": "true" },
            s("rect", { class: "track", width: "100%", height: "100%", rx: "2" }),
            s(
              "rect",
              {
                class: `fill ${one.tone || (diverging ? (one.value < 0 ? "down" : "up") : "s1")}`,
                x: pc(x),
                width: pc(Math.max(width, share ? 0.4 : 0)),
                height: "100%",
                rx: "2",
              },
            ),
            diverging ? s("line", { class: "zero", x1: "50%", x2: "50%", y1: "0", y2: "100%" }) : null,
          ),
          h("span", { class: "bar-value" }, one.text),
        );
      }),
    );
  const table = head ? () => ({ head, rows: items.map((one) => [one.name, one.text]) }) : null;
  return figure(id, { title, summary, table, wide }, draw);
}

/** A sparkline: a line without axes, as small as a word. */
export function sparkline(points, label) {
  if (points.length < 2) return null;
  const xr = range(points.map((point) => point[0]), { min: points[0][0], max: points.at(-1)[0] });
  const yr = range(points.map((point) => point[1]), { zero: true });
  return s(
    "svg",
    { class: "spark", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("path", { class: "line s1", d: path(points, xr, yr) }),
  );
}

/** A fill gauge. */
export function meter(share, label, level = "") {
  const known = Number.isFinite(share) ? Math.max(0, Math.min(1, share)) : 0;
  return s(
    "svg",
    { class: `meter ${level}`, role: "img", "aria-label": label },
    s("rect", { class: "track", width: "100%", height: "100%", rx: "3" }),
    s("rect", { class: "fill s1", width: pc(100 * known), height: "100%", rx: "3" }),
  );
}
