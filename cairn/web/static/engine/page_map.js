/**
 * The KV cache as a map: each cell an equal share of the pages, in the order of their ids.
 *
 *     '0'..'9' tenths held by requests      'c' mostly cached      '.' free
 *
 * Cells are elements, so that the theme and the transitions are CSS; only those that changed are touched.
 */

import { h, setText } from "../dom.js";
import { count, percent } from "../format.js";

export function pageMap() {
  const grid = h("div", { class: "page-map", role: "img" });
  const words = h("p", { class: "soft" });
  let shown = "";

  function show(pages) {
    if (pages.map.length !== shown.length) {
      grid.replaceChildren(...Array.from(pages.map, () => h("i")));
      shown = "\0".repeat(pages.map.length);
    }
    for (let at = 0; at < pages.map.length; at += 1) {
      if (pages.map[at] !== shown[at]) paint(grid.children[at], pages.map[at]);
    }
    shown = pages.map;
    const shares = ["used", "cached", "free"].map((name) => `${percent(pages[name], pages.total)} ${name}`);
    grid.setAttribute("aria-label", shares.join(", "));
    setText(words, `${count(pages.used)} of ${count(pages.total)} pages held, each ${count(pages.size_tokens)} tokens`);
  }

  const legend = h("ul", { class: "legend" },
    h("li", {}, h("i", { class: "cell held" }), "held by requests"),
    h("li", {}, h("i", { class: "cell cached" }), "cached prefix, free to take"),
    h("li", {}, h("i", { class: "cell" }), "free"));
  return { element: h("div", {}, words, grid, legend), show };
}

function paint(cell, sign) {
  const held = sign >= "0" && sign <= "9";
  cell.className = held ? "held" : sign === "c" ? "cached" : "";
  cell.style.setProperty("--share", held ? `${35 + (65 * (Number(sign) + 1)) / 10}%` : "0%");
}
