/**
 * The chat: one conversation on the screen, and the answers that are on their way in any of them.
 *
 *     composer -> grow the tree -> Talk -> message on the screen, shelf
 *
 * Holds the state of the view and connects the parts; each part is a file of its own.
 */

import { arrange, h, iconButton, setText } from "../dom.js";
import { plural } from "../format.js";
import { getJSON } from "../server.js";
import { abilityNotice, findAbility } from "./ability.js";
import { makeComposer } from "./composer.js";
import { follow, grow, newConversation, path, versions } from "./conversation.js";
import { conversationList } from "./list.js";
import { messageView } from "./message.js";
import { firstParameters, isSmall, openParameters } from "./parameters.js";
import { Shelf } from "./shelf.js";
import { Talk } from "./talk.js";
import { troubleNotice } from "./trouble.js";
import { welcome } from "./welcome.js";

const SAVE_MS = 1000;
const NEAR_END = 90; // pixels: whoever is so close to the end wants to follow it

export function makeView({ feed }) {
  return new ChatView(feed).view;
}

class ChatView {
  shelf = new Shelf();
  talks = new Map(); // of a conversation's id
  shown = new Map(); // message views, of a node's id
  ability = { mode: "chat", reason: "" };
  first = firstParameters(); // until the model's size is known
  current = this.fresh();
  does = {
    again: (node) => this.again(node),
    edit: (node, text) => this.edit(node, text),
    turn: (node, at) => this.turn(node, at),
  };
  #due = false;

  constructor(feed) {
    this.feed = feed;
    this.composer = makeComposer({
      send: (text, pictures) => this.send(text, pictures),
      refuse: (text) => this.say(text),
      stop: () => this.stop(),
      parameters: () => this.openParameters(),
    });
    this.list = conversationList(this.shelf, { remove: (one) => this.remove(one) }, (one) => this.talks.has(one.id));
    this.thread = h("div", { class: "thread" });
    this.notice = h("div", { class: "notice", role: "status", hidden: true });
    this.live = h("div", { class: "off-screen", "aria-live": "polite" });
    this.toEnd = iconButton("down", "To the end", () => this.scrollToEnd(), { class: "icon-button to-end", hidden: true });
    this.greeting = welcome((text) => this.send(text));
    this.scroller = h("div", { class: "scroller", tabindex: "-1" }, this.notice, this.greeting.element, this.thread);
    this.scroller.addEventListener("scroll", () => (this.toEnd.hidden = this.nearEnd), { passive: true });
    const drawer = iconButton("list", "Conversations", () => this.list.toggle(), { class: "icon-button drawer-button" });
    const dock = h("div", { class: "dock" }, this.toEnd, this.composer.element);
    const element = h("section", { class: "chat", "aria-label": "Chat" },
      this.list.scrim, this.list.element,
      h("div", { class: "talk" }, drawer, this.scroller, dock, this.live));
    this.composer.listen(element);
    this.view = { element, show: (id) => this.show(id), hide: () => {} };
    this.shelf.onFull = () => this.say("This browser stores nothing more, so new messages are forgotten when the page is left.");
    window.addEventListener("storage", (event) => this.shelf.takeOver(event) && !this.talks.size && this.reload());
    window.addEventListener("pagehide", () => this.talks.forEach(({ conversation }) => this.shelf.put(conversation)));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && element.isConnected && !document.querySelector("dialog[open]")) this.stop();
    });
    this.probe();
  }

  // -- which conversation ------------------------------------------------------------------------

  show(id) {
    const found = this.shelf.get(id);
    if (found) this.current = found;
    else if (id === "new" && this.current.leaf) this.current = this.fresh();
    if (!found && id) history.replaceState(null, "", "#/chat"); // new, or deleted meanwhile
    this.draw();
    this.scrollToEnd();
    if (matchMedia("(hover: hover)").matches) this.composer.focus(); // on a phone it would open the keyboard
  }

  fresh() {
    return newConversation(this.shelf.parameters ?? this.first);
  }

  reload() {
    this.current = this.shelf.get(this.current.id) ?? this.current;
    this.draw();
  }

  remove(conversation) {
    const title = conversation.title || "this conversation";
    if (!confirm(`Delete “${title}”? It is stored nowhere else.`)) return;
    this.talks.get(conversation.id)?.stop();
    this.shelf.remove(conversation.id);
    if (conversation.id === this.current.id) this.current = this.fresh();
    this.draw();
  }

  // -- what the person does ----------------------------------------------------------------------

  send(text, images = []) {
    if (this.talks.has(this.current.id)) return;
    const asked = grow(this.current, this.current.leaf, { role: "user", content: text, ...(images.length && { images }) });
    this.answer(asked.id);
  }

  edit(node, text) {
    if (this.talks.has(this.current.id)) return;
    const { images } = node;
    this.answer(grow(this.current, node.parent, { role: "user", content: text, ...(images && { images }) }).id);
  }

  again(node) {
    if (!this.talks.has(this.current.id)) this.answer(node.parent);
  }

  turn(node, at) {
    if (this.talks.has(this.current.id)) return;
    follow(this.current, versions(this.current, node)[at]);
    this.shelf.put(this.current);
    this.draw();
  }

  stop() {
    this.talks.get(this.current.id)?.stop();
  }

  openParameters() {
    openParameters(this.current.parameters, this.first, this.ability.mode === "chat", (parameters) => {
      this.current.parameters = parameters;
      this.shelf.parameters = parameters;
      if (this.current.leaf) this.shelf.put(this.current);
    });
  }

  // -- an answer ---------------------------------------------------------------------------------

  async answer(parent) {
    const conversation = this.current;
    const node = grow(conversation, parent, { role: "assistant" });
    let saved = 0;
    const talk = new Talk(conversation, node, this.ability.mode, () => {
      if (Date.now() - saved > SAVE_MS || node.status !== "running") {
        saved = Date.now();
        if (this.shelf.get(conversation.id)) this.shelf.put(conversation); // unless it was deleted
      }
      if (node.status !== "running") this.talks.delete(conversation.id);
      this.drawSoon();
    });
    this.talks.set(conversation.id, talk);
    this.shelf.put(conversation);
    history.replaceState(null, "", `#/chat/${conversation.id}`);
    this.draw();
    this.scrollToEnd();
    await talk.run();
    this.list.update(this.current);
    const tokens = plural(node.stats?.tokens ?? 0, "token");
    setText(this.live, node.status === "done" ? `Answer finished, ${tokens}.` : `Answer ${node.status}.`);
  }

  // -- the screen --------------------------------------------------------------------------------

  draw() {
    const nodes = path(this.current);
    const kept = (node) => (this.shown.get(node.id)?.node === node ? this.shown.get(node.id) : null);
    const views = nodes.map((node) => kept(node) ?? messageView(node, this.does));
    this.shown = new Map(views.map((view) => [view.node.id, view]));
    for (const view of views) view.update(this.place(view.node));
    arrange(this.thread, views.map(({ element }) => element));
    this.greeting.element.hidden = nodes.length > 0 || this.ability.mode === "nothing";
    this.composer.setRunning(this.talks.has(this.current.id));
    this.list.update(this.current);
  }

  /** At most once per frame, and only the message that grows. */
  drawSoon() {
    if (this.#due) return;
    this.#due = true;
    const frame = document.hidden ? (run) => setTimeout(run, 200) : requestAnimationFrame;
    frame(() => {
      this.#due = false;
      const follows = this.nearEnd;
      const view = this.shown.get(this.current.leaf);
      view?.update(this.place(view.node));
      this.composer.setRunning(this.talks.has(this.current.id));
      if (follows) this.scrollToEnd();
    });
  }

  place(node) {
    const all = versions(this.current, node);
    return { at: all.indexOf(node), of: all.length };
  }

  get nearEnd() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < NEAR_END;
  }

  scrollToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  // -- what the model can do ---------------------------------------------------------------------

  async probe() {
    try {
      this.ability = await findAbility();
      this.say(abilityNotice(this.ability));
      await this.readSize();
      this.composer.setHint(this.ability.mode === "text" ? "Begin a text, and the model goes on" : "Write to the model");
      this.composer.setOff(this.ability.mode === "nothing");
      this.draw();
    } catch (error) {
      this.notice.hidden = false;
      this.notice.replaceChildren(troubleNotice(error, () => this.probe()));
    }
  }

  /** A small model gets other parameters, and the greeting says so. */
  async readSize() {
    const { parameters, sees } = await getJSON("/cairn/model");
    this.composer.pictures.setSees(sees);
    this.first = firstParameters(parameters);
    if (!this.current.leaf && !this.shelf.parameters) this.current.parameters = { ...this.first };
    this.greeting.setMode(this.ability.mode, isSmall(parameters));
  }

  say(text) {
    this.notice.hidden = !text;
    this.notice.replaceChildren(text ?? "");
  }
}
