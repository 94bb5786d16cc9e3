/** The engine, live: what it does now, what its memory holds, where a step's time goes, how far the floor is. */

import { h, setText } from "../dom.js";
import { count } from "../format.js";
import { lines, stackedBars } from "./charts.js";
import { batchBar, figures } from "./figures.js";
import { floorView } from "./floor.js";
import { keysTable } from "./keys.js";
import { pageMap } from "./page_map.js";

// From the bottom of a bar up: what the machine works, then what the host adds.
const PARTS = [["wait", "decode"], ["launch", "prefill"], ["schedule", "schedule"], ["update", "queue"]];
const STATES = {
  connecting: "Connecting to the engine.", paused: "Paused while nobody looks.",
  lost: "No connection to the server; trying again.", locked: "The server asks for a key first.",
  absent: "This server shows nothing of its engine.",
};

const card = (title, hint, ...children) =>
  h("section", { class: "card" }, h("h2", {}, title), hint && h("p", { class: "hint" }, hint), children);
const wide = (...args) => Object.assign(card(...args), { className: "card wide" });

export function makeView({ feed }) {
  const state = h("p", { class: "soft", role: "status" });
  const top = figures();
  const pages = pageMap();
  const batch = batchBar();
  const floor = floorView();
  const keys = keysTable();
  const holders = { speed: h("div", { class: "plot" }), load: h("div", { class: "plot" }), steps: h("div", { class: "plot" }) };
  const body = h("div", { class: "cards" },
    card("Tokens per second", "over the last two minutes", holders.speed),
    card("Requests", "running and waiting", holders.load),
    card("KV pages", null, pages.element),
    h("div", { class: "stack" },
      card("The newest batch", null, batch.element),
      card("Distance to the floor", "measured beside what this machine needs at least", floor.element)),
    wide("Steps", "where each step's time went, in milliseconds; the line is the floor", holders.steps),
    wide("Keys", "tokens, and each key's share of the device's time and energy", keys.element));
  const element = h("section", { class: "inside", "aria-label": "Engine" },
    h("div", { class: "head" }, h("h1", {}, "Engine"), state), top.element, body);
  let charts = null;
  let leave = () => {};

  function show(now) {
    const { state: known, latest, history } = now;
    setText(state, known === "live" ? `${latest.model}, ${latest.status}, ${count(latest.steps)} steps so far` : STATES[known]);
    element.dataset.state = known;
    body.hidden = top.element.hidden = !latest;
    if (!latest) return;
    charts ??= makeCharts(holders); // once they have a width
    top.show(latest);
    pages.show(latest.pages);
    batch.show(latest.batch);
    floor.show(latest.recent);
    keys.refresh();
    const column = (name) => history.map((sample) => sample[name]);
    charts.speed.show([column("time"), column("output"), column("prompt")]);
    charts.load.show([column("time"), column("running"), column("waiting")]);
    const field = (name) => latest.recent.map((step) => (step[name] == null ? null : step[name] * 1000));
    charts.steps.show(latest.recent.map(({ number }) => number), PARTS.map(([name]) => field(`${name}_s`)), field("floor_s"));
  }
  return { element, show: () => (leave(), (leave = feed.subscribe(show))), hide: () => leave() };
}

function makeCharts(holders) {
  return {
    speed: lines(holders.speed, [["output", "decode"], ["prompt", "prefill"]], "tok/s"),
    load: lines(holders.load, [["running", "decode"], ["waiting", "queue"]], "", true),
    steps: stackedBars(holders.steps, PARTS, ["floor", "bad"]),
  };
}
