/**
 * The frame of the page: which view is shown, the pulse in the corner, the keys.
 *
 *     #/chat/ID   #/engine   #/requests/ID   #/model   #/learn/TOPIC
 *
 * A view is {element, show(rest), hide()}, and is loaded when it is first wanted.
 */

import { installAccess } from "./access.js";
import { h, icon, iconButton, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { figure } from "./format.js";
import { installShortcuts, showShortcuts } from "./shortcuts.js";
import { themeButton } from "./theme.js";

const VIEWS = [
  ["chat", "Chat", () => import("./chat/view.js")],
  ["engine", "Engine", () => import("./engine/view.js")],
  ["requests", "Requests", () => import("./requests/view.js")],
  ["model", "Model", () => import("./model/view.js")],
  ["learn", "Learn", () => import("./learn/view.js")],
];

const feed = new Feed();
const made = new Map();
const main = document.querySelector("main");
const tabs = new Map(VIEWS.map(([name, label]) => [name, h("a", { href: `#/${name}` }, icon(name), h("span", {}, label))]));
let shown = null;
let turn = 0; // a slow import must not overwrite a later choice

async function navigate() {
  const [, wanted, rest] = /^#\/(\w*)\/?(.*)$/.exec(location.hash) ?? [];
  if (shown && wanted === undefined) return; // #main, the skip link
  const [name, label, load] = VIEWS.find(([name]) => name === wanted) ?? VIEWS[0];
  const mine = ++turn;
  if (!made.has(name)) made.set(name, load().then((module) => module.makeView({ feed })));
  let view = null;
  try {
    view = await made.get(name);
  } catch {
    made.delete(name);
  }
  if (mine !== turn) return;
  if (!view) return notLoaded(label);
  if (shown !== view) {
    shown?.hide();
    main.replaceChildren(view.element);
    document.title = name === "chat" ? "Cairn" : `${label} · Cairn`;
    for (const [key, tab] of tabs) tab.toggleAttribute("aria-current", key === name);
    tabs.get(name).setAttribute("aria-current", "page");
    shown = view;
  }
  view.show(decodeURIComponent(rest ?? ""));
}

/** Browsers remember a module that did not come, so only a reload tries again. */
function notLoaded(label) {
  shown?.hide();
  shown = null;
  main.replaceChildren(h("section", { class: "inside" }, h("h1", {}, label),
    h("p", { class: "soft" }, "This view did not come from the server. Is it still running?"),
    h("button", { type: "button", class: "strong-button", onclick: () => location.reload() }, "Reload the page")));
}

// -- the pulse ------------------------------------------------------------------------------------

const WORDS = {
  connecting: "connecting", paused: "paused", lost: "no connection", locked: "needs a key", absent: "ready",
};

function pulse() {
  const name = h("span", { class: "pulse-model" });
  const doing = h("span", { class: "pulse-doing" });
  const link = h("a", { class: "pulse", href: "#/engine", title: "The engine, live" }, h("i", { class: "dot" }), name, doing);
  feed.subscribe(({ state, latest }) => {
    const busy = state === "live" && latest.running + latest.waiting > 0;
    const unwell = state === "live" && latest.status !== "ok";
    link.dataset.state = unwell ? "lost" : busy ? "busy" : state;
    setText(name, latest?.model ?? "");
    setText(doing, state !== "live" ? WORDS[state] : unwell ? latest.status
      : busy ? `${figure(latest.rate.output_tokens_per_s)} tok/s` : "idle");
  });
  return link;
}

// -- start ----------------------------------------------------------------------------------------

const go = (name) => () => (location.hash = `#/${name}`);
const theme = themeButton();
const press = (selector) => () => document.querySelector(selector)?.click();
const KEYS = [
  ["1", "chat", go("chat")],
  ["2", "the engine", go("engine")],
  ["3", "requests", go("requests")],
  ["4", "the model", go("model")],
  ["5", "learn", go("learn")],
  ["n", "a new conversation", () => (location.hash = "#/chat/new")],
  ["/", "write", () => document.querySelector(".composer textarea")?.focus()],
  ["p", "parameters", press("[data-does=parameters]")],
  ["r", "answer again", press(".message:last-of-type [data-does=again]")],
  ["t", "theme", () => theme.click()],
  ["?", "this list", () => showShortcuts(KEYS)],
];

installAccess();
installShortcuts(KEYS);
document.querySelector(".tabs").append(...tabs.values());
const help = iconButton("help", "Keys (?)", () => showShortcuts(KEYS), { class: "icon-button wide-only" });
document.querySelector(".right").append(pulse(), help, theme);
window.addEventListener("hashchange", navigate);
navigate();
