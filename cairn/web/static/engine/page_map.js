/**
 * The KV cache as a map: each cell an equal share of the pages, in the order of their ids.
 *
 *     '0'..'9' tenths held by requests      'c' mostly cached      '.' free      a second line: the cache group
 *
 * Cells are elements, so that the theme and the transitions are CSS; only those that changed are touched.
 */

import { h, setText } from "../dom.js";
import { count, percent } from "../format.js";

export function pageMap() {
  const grid = h("div", { class: "page-map", role: "img" });
  const words = h("p", { class: "soft" });
  let shown = [];

  function show(pages) {
    const cells = Array.from(pages.map, (sign, at) => sign + (pages.map_groups[at] ?? ""));
    if (cells.length !== shown.length) {
      grid.replaceChildren(...cells.map(() => h("i")));
      shown = [];
    }
    cells.forEach((cell, at) => cell !== shown[at] && paint(grid.children[at], cell));
    shown = cells;
    const shares = ["used", "cached", "free"].map((name) => `${percent(pages[name], pages.total)} ${name}`);
    grid.setAttribute("aria-label", shares.join(", "));
    const groups = pages.groups.map(({ kind, window, used }) => `${count(used)} ${kind}${window ? ` of ${count(window)}` : ""}`);
    const held = `${count(pages.used)} of ${count(pages.total)} pages held, each ${count(pages.size_tokens)} tokens`;
    setText(words, groups.length ? `${held}: ${groups.join(", ")}` : held);
  }

  const legend = h("ul", { class: "legend" },
    h("li", {}, h("i", { class: "cell held" }), "held by requests"),
    h("li", {}, h("i", { class: "cell cached" }), "cached prefix, free to take"),
    h("li", {}, h("i", { class: "cell" }), "free"));
  return { element: h("div", {}, words, grid, legend), show };
}

function paint(cell, [sign, group]) {
  const held = sign >= "0" && sign <= "9";
  cell.dataset.group = held ? group ?? "" : "";
  cell.className = held ? "held" : sign === "c" ? "cached" : "";
  cell.style.setProperty("--share", held ? `${35 + (65 * (Number(sign) + 1)) / 10}%` : "0%");
}
