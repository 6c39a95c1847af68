"use strict";
// Draws the figures in the colour scheme of the reader's system; print is always light.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const darkColours = read("dark");
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const VALUES = new Set(["x", "y", "name", "customdata", "ticktext", "categoryarray", "legendgroup", "text"]);
  const PAPER_WIDTH = 660;

  const recoloured = (tree) => {
    if (typeof tree === "string") return darkColours[tree] ?? tree;
    if (Array.isArray(tree)) return tree.map(recoloured);
    if (tree === null || typeof tree !== "object") return tree;
    return Object.fromEntries(
      Object.entries(tree).map(([key, value]) => [key, VALUES.has(key) ? value : recoloured(value)]),
    );
  };

  const draw = ({ dark, width }) => {
    for (const place of document.querySelectorAll(".plot")) {
      const figure = figures[place.dataset.figure];
      const { data, layout } = structuredClone(dark ? recoloured(figure) : figure);
      if (width) Object.assign(layout, { width, autosize: false });
      if (touch.matches) layout.dragmode = false; // so that touching a plot scrolls the page
      Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
    }
  };

  const onScreen = () => draw({ dark: wantsDark.matches });
  onScreen();
  wantsDark.addEventListener("change", onScreen);
  addEventListener("beforeprint", () => draw({ dark: false, width: PAPER_WIDTH }));
  addEventListener("afterprint", onScreen);
  document.documentElement.dataset.drawn = "yes";
})();
