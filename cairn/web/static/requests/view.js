/**
 * The request explorer: the requests that the server remembers, newest or slowest first.
 *
 * Asks anew every two seconds while it is on the screen. While one is open the list stands still, so that nothing moves
 * under the reader; a button says how many came meanwhile.
 */

import { arrange, h, setText } from "../dom.js";
import { plural } from "../format.js";
import { getJSON } from "../server.js";
import { troubleNotice } from "../chat/trouble.js";
import { requestRow, traceButton } from "./row.js";
import { lengthOf, PARTS } from "./waterfall.js";

const EMPTY = "No request yet. Send one from the chat, and its time is taken apart here.";
const WORDS = "Where the time of each one went. Prompts and answers are kept only by a server with --capture, in its folder.";
const EVERY_MS = 2000;
const LIMIT = 100;
const ORDERS = [["newest", "Newest first"], ["slowest", "Slowest first"]];
const LEGEND = ["tokenize", "queue", "prefill", "decode", "respond"];

export function makeView() {
  return new RequestsView().view;
}

class RequestsView {
  order = "newest";
  rows = new Map();
  listed = []; // ids, as they stand
  #timer = null;
  #open = new Set();
  #asking = 0;

  constructor() {
    this.items = h("ol", { class: "request-list" });
    this.empty = h("p", { class: "soft empty", hidden: true }, EMPTY);
    this.more = h("button", { type: "button", class: "plain-button", hidden: true, onclick: () => this.closeAll() });
    this.trouble = h("div", { class: "trouble-place" });
    const legend = LEGEND.map((name) => h("li", {}, h("i", { class: `cell ${name}` }), PARTS[name]));
    const element = h("section", { class: "inside", "aria-label": "Requests" },
      h("div", { class: "head" }, h("h1", {}, "Requests"), h("p", { class: "soft" }, WORDS)),
      h("div", { class: "bar-of-tools" },
        h("div", { class: "segments", role: "radiogroup", "aria-label": "Order" }, ORDERS.map((each) => this.choice(each))),
        h("ul", { class: "legend" }, legend), this.more,
        h("div", { class: "foot" }, traceButton("Recent trace", "/cairn/trace", "cairn-recent"))),
      this.trouble, this.empty, this.items);
    this.items.addEventListener("keydown", (event) => this.step(event));
    this.view = { element, show: (id) => this.show(id), hide: () => this.hide() };
  }

  choice([order, label]) {
    const onchange = () => this.setOrder(order);
    const input = h("input", { type: "radio", name: "order", value: order, checked: order === this.order, onchange });
    return h("label", {}, input, h("span", {}, label));
  }

  show(id) {
    this.hide();
    this.#timer = setInterval(() => !document.hidden && this.refresh(), EVERY_MS);
    this.refresh().then(() => id && this.openOne(id));
  }

  hide() {
    clearInterval(this.#timer);
  }

  setOrder(order) {
    this.order = order;
    this.closeAll();
  }

  closeAll() {
    for (const id of this.#open) this.rows.get(id)?.setOpen(false);
    this.#open.clear();
    this.refresh();
  }

  async refresh() {
    const mine = ++this.#asking;
    try {
      const { requests } = await getJSON(`/cairn/requests?order=${this.order}&limit=${LIMIT}`, { quiet: this.rows.size > 0 });
      if (mine === this.#asking) this.draw(requests);
      this.trouble.replaceChildren();
    } catch (error) {
      this.trouble.replaceChildren(troubleNotice(error, () => this.refresh()));
    }
  }

  draw(requests) {
    const found = new Map(requests.map((request) => [request.id, request]));
    const held = this.#open.size > 0;
    const fresh = requests.filter(({ id }) => !this.listed.includes(id)).length;
    if (!held) this.listed = [...found.keys()];
    const longest = Math.max(...requests.map(lengthOf), 1e-6);
    for (const id of this.listed) if (found.has(id)) this.row(id).update(found.get(id), longest);
    for (const id of this.rows.keys()) if (!this.listed.includes(id)) this.rows.delete(id);
    arrange(this.items, this.listed.filter((id) => this.rows.has(id)).map((id) => this.rows.get(id).element));
    this.empty.hidden = this.listed.length > 0;
    this.more.hidden = !held || fresh === 0;
    setText(this.more, `${plural(fresh, "more request")}: show`);
  }

  row(id) {
    if (!this.rows.has(id)) this.rows.set(id, requestRow(id, (id, open) => (open ? this.#open.add(id) : this.#open.delete(id))));
    return this.rows.get(id);
  }

  /** The one that a link names; it may stand below what the list holds, or be forgotten. */
  async openOne(id) {
    if (!this.rows.has(id)) {
      try {
        const request = await getJSON(`/cairn/requests/${encodeURIComponent(id)}`);
        this.listed.unshift(id);
        this.row(id).update(request, lengthOf(request));
        this.items.prepend(this.rows.get(id).element);
      } catch (error) {
        return this.trouble.replaceChildren(troubleNotice(error, null));
      }
    }
    this.#open.add(id);
    this.rows.get(id).setOpen(true);
    this.rows.get(id).element.scrollIntoView({ block: "nearest" });
  }

  /** Arrows go from line to line. */
  step(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || !event.target.classList.contains("line")) return;
    event.preventDefault();
    const all = [...this.items.querySelectorAll(".line")];
    all[all.indexOf(event.target) + by]?.focus();
  }
}
