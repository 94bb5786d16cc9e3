/**
 * The topics as a graph: a band for each depth of prerequisites, a line from each topic to what needs it.
 *
 *     no prerequisites    [ ] [ ] [ ]
 *     one step                [ ] [ ]      a topic that is chosen shows its lines, what it needs and what needs it
 *     two steps ...           [ ]
 *
 * Topics are text that wraps, so the same graph fits a wide window and a phone.
 */

import { h } from "../dom.js";
import { said, word } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

export function topicGraph(map) {
  const topics = map.courses.flatMap(({ id, sections }) => sections.flatMap((section) => section.topics.map((one) => ({ ...one, course: id }))));
  const graph = new Graph(topics);
  const courses = map.courses.map(({ id }) => h("button", { type: "button", class: "chip", "aria-pressed": "false", onclick: (event) => graph.only(id, event.currentTarget) }, id));
  requestAnimationFrame(() => graph.draw());
  return [
    h("p", {}, h("a", { href: "#/learn" }, `← ${word("back")}`)),
    h("div", { class: "head" }, h("h1", {}, word("graph"))),
    h("div", { class: "topic-chips" }, courses),
    graph.panel, graph.element,
  ];
}

class Graph {
  constructor(topics) {
    this.topics = new Map(topics.map((topic) => [topic.id, topic]));
    this.nodes = new Map(topics.map((topic) => [topic.id, this.#node(topic)]));
    this.panel = h("div", { class: "card chosen", role: "status" }, h("p", { class: "soft" }, word("choose one")));
    this.lines = document.createElementNS(SVG, "svg");
    this.lines.setAttribute("aria-hidden", "true");
    this.element = h("div", { class: "topic-graph", role: "group", "aria-label": word("graph") }, this.lines,
      bands(this.topics).map((band, depth) => h("div", { class: "band" }, h("span", { class: "soft number" }, depth), h("div", { class: "topic-chips" }, band.map((id) => this.nodes.get(id))))));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  #node(topic) {
    return h("button", { type: "button", class: `chip ${topic.state}`, title: word(topic.state), onclick: () => this.choose(topic.id) },
      h("i", { class: `state ${topic.state}` }), said(topic));
  }

  /** Lines between the nodes as they lie now. */
  draw() {
    const room = this.element.getBoundingClientRect();
    if (!room.width) return;
    this.lines.setAttribute("viewBox", `0 0 ${room.width} ${room.height}`);
    const place = new Map([...this.nodes].map(([id, node]) => [id, node.getBoundingClientRect()]));
    const paths = [...this.topics.values()].flatMap((topic) => topic.requires.filter((id) => place.has(id)).map((id) => edge(room, id, place.get(id), topic.id, place.get(topic.id))));
    this.lines.replaceChildren(...paths);
    if (this.chosen) this.choose(this.chosen);
  }

  choose(id) {
    this.chosen = id;
    const topic = this.topics.get(id);
    const after = [...this.topics.values()].filter((one) => one.requires.includes(id)).map((one) => one.id);
    const near = new Set([id, ...topic.requires, ...after]);
    for (const [other, node] of this.nodes) node.dataset.near = near.has(other) ? (other === id ? "self" : "yes") : "no";
    for (const path of this.lines.children) path.classList.toggle("near", path.dataset.from === id || path.dataset.to === id);
    this.panel.replaceChildren(h("p", {}, h("b", {}, said(topic)), h("span", { class: "soft" }, ` · ${topic.course} · ${word(topic.state)} · `), h("a", { href: `#/learn/${id}` }, word("open"))),
      this.#named("requires", topic.requires), this.#named("needs it", after));
  }

  #named(name, ids) {
    const titles = ids.filter((id) => this.topics.has(id)).map((id) => said(this.topics.get(id)));
    return titles.length ? h("p", { class: "soft" }, `${word(name)}: ${titles.join(", ")}`) : "";
  }

  /** One course, or all again. */
  only(course, button) {
    const on = button.getAttribute("aria-pressed") !== "true";
    for (const one of button.parentElement.children) one.setAttribute("aria-pressed", String(on && one === button));
    for (const [id, node] of this.nodes) node.hidden = on && this.topics.get(id).course !== course;
    this.draw();
  }
}

/** Topics by depth, the longest way from one without prerequisites; in a band, those with common prerequisites together. */
function bands(topics) {
  const depths = new Map();
  const depth = (id) => {
    if (!depths.has(id)) {
      const needed = topics.get(id).requires.filter((other) => topics.has(other));
      depths.set(id, needed.length ? 1 + Math.max(...needed.map(depth)) : 0);
    }
    return depths.get(id);
  };
  const found = [];
  for (const id of topics.keys()) (found[depth(id)] ??= []).push(id);
  const at = new Map();
  for (const band of found) {
    const middle = (id) => topics.get(id).requires.reduce((sum, other) => sum + (at.get(other) ?? 0), 0) / (topics.get(id).requires.length || 1);
    band.sort((one, other) => middle(one) - middle(other));
    band.forEach((id, place) => at.set(id, place / band.length));
  }
  return found;
}

/** From the lower edge of what is needed to the upper edge of what needs it; none for what is hidden. */
function edge(room, one, from, other, to) {
  const path = document.createElementNS(SVG, "path");
  Object.assign(path.dataset, { from: one, to: other });
  if (from.width && to.width) {
    const [x1, y1] = [from.left + from.width / 2 - room.left, from.bottom - room.top];
    const [x2, y2] = [to.left + to.width / 2 - room.left, to.top - room.top];
    path.setAttribute("d", `M${x1},${y1} C${x1},${y1 + 28} ${x2},${y2 - 28} ${x2},${y2}`);
  }
  return path;
}
