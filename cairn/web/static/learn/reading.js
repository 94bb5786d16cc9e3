/** What to read: an arXiv number, a DOI, or an address at the end of a line is a link. */

import { h } from "../dom.js";

const PLACES = [
  [/arXiv:(\d{4}\.\d{4,5}|[a-z-]+\/\d{7})/, (found) => `https://arxiv.org/abs/${found[1]}`],
  [/doi:(10\.\S+)/, (found) => `https://doi.org/${found[1]}`],
  [/(?:[a-z0-9-]+\.)+[a-z]{2,}(?:\/\S*)?$/, (found) => `https://${found[0]}`],
];

export const readingList = (titles) => h("ul", { class: "notes reading" }, titles.map((title) => h("li", {}, linked(title))));

function linked(title) {
  for (const [pattern, address] of PLACES) {
    const found = pattern.exec(title);
    if (!found) continue;
    const link = h("a", { href: address(found), target: "_blank", rel: "noopener noreferrer" }, found[0]);
    return [title.slice(0, found.index), link, title.slice(found.index + found[0].length)];
  }
  return title;
}
