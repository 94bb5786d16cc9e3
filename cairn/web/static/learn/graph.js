/**
 * The topics as a graph: a column for each depth of prerequisites, a line from each to what needs it.
 *
 *     no prerequisites | need one step | need two ...
 *
 * Wider than a phone, it scrolls; pointing at a topic shows its lines.
 */

import { h } from "../dom.js";
import { said, word } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, GAP] = [188, 22, 52];

export function topicGraph(map) {
  const topics = map.courses.flatMap(({ sections }) => sections).flatMap((section) => section.topics);
  const place = layOut(topics);
  const columns = 1 + Math.max(...[...place.values()].map(({ column }) => column));
  const rows = 1 + Math.max(...[...place.values()].map(({ row }) => row));
  const size = [columns * (WIDTH + GAP), rows * (HEIGHT + 4) + 8];
  const picture = svg("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, width: size[0], height: size[1], role: "img", "aria-label": word("graph"), class: "topic-graph" });
  for (const topic of topics) for (const needed of topic.requires) if (place.has(needed)) picture.append(edge(place.get(needed), place.get(topic.id), needed, topic.id));
  for (const topic of topics) picture.append(node(topic, place.get(topic.id), picture));
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, word("graph"))),
    h("div", { class: "graph-room", tabindex: "0" }, picture),
  ];
}

/** Column: the longest way from a topic without prerequisites. Row: the next free one. */
function layOut(topics) {
  const byId = new Map(topics.map((topic) => [topic.id, topic]));
  const depths = new Map();
  const depth = (id) => {
    if (!depths.has(id)) {
      const needed = byId.get(id).requires.filter((other) => byId.has(other));
      depths.set(id, needed.length ? 1 + Math.max(...needed.map(depth)) : 0);
    }
    return depths.get(id);
  };
  const filled = [];
  return new Map(topics.map(({ id }) => {
    const column = depth(id);
    filled[column] = (filled[column] ?? -1) + 1;
    return [id, { column, row: filled[column] }];
  }));
}

const left = ({ column }) => column * (WIDTH + GAP) + 4;
const top = ({ row }) => row * (HEIGHT + 4) + 4;

function edge(from, to, one, other) {
  const [x1, y1, x2, y2] = [left(from) + WIDTH, top(from) + HEIGHT / 2, left(to), top(to) + HEIGHT / 2];
  return svg("path", { d: `M${x1},${y1} C${x1 + GAP / 2},${y1} ${x2 - GAP / 2},${y2} ${x2},${y2}`, "data-from": one, "data-to": other });
}

function node(topic, at, picture) {
  const link = svg("a", { href: `#/learn/${topic.id}`, class: topic.state });
  const label = svg("text", { x: left(at) + 8, y: top(at) + 15 });
  const title = said(topic);
  label.textContent = title.length > 27 ? `${title.slice(0, 26)}…` : title;
  const full = svg("title", {});
  full.textContent = `${title} (${word(topic.state)})`;
  link.append(full, svg("rect", { x: left(at), y: top(at), width: WIDTH, height: HEIGHT, rx: 6 }), label);
  const mark = (on) => () => picture.querySelectorAll("path").forEach((path) =>
    path.classList.toggle("near", on && (path.dataset.from === topic.id || path.dataset.to === topic.id)));
  link.addEventListener("pointerenter", mark(true));
  link.addEventListener("pointerleave", mark(false));
  return link;
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
