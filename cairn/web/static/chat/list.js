/** The conversations of this browser: a column beside the chat, a drawer on a phone. */

import { h, icon, iconButton } from "../dom.js";

/** `does` is {remove(conversation)}; choosing is a link. `isRunning` says where an answer is on its way. */
export function conversationList(shelf, does, isRunning) {
  const items = h("ul", {});
  const empty = h("p", { class: "soft" }, "Conversations stay in this browser.");
  const element = h("aside", { class: "conversations", "aria-label": "Conversations" },
    h("a", { class: "new-chat", href: "#/chat/new" }, icon("plus"), "New conversation"), items, empty);
  const scrim = h("div", { class: "scrim", onclick: () => setOpen(false) });
  const narrow = matchMedia("(max-width: 860px)");

  function setOpen(open) {
    element.classList.toggle("open", open);
    scrim.classList.toggle("open", open);
    element.inert = narrow.matches && !open;
    if (open) element.querySelector("a").focus();
  }
  narrow.addEventListener("change", () => setOpen(false));
  items.addEventListener("click", (event) => event.target.closest("a") && setOpen(false));
  element.firstChild.addEventListener("click", () => setOpen(false));
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !element.classList.contains("open")) return;
    event.stopPropagation();
    setOpen(false);
  });
  setOpen(false);

  function update(current) {
    const all = shelf.all();
    empty.hidden = all.length > 0;
    items.replaceChildren(...all.map((one) => item(one, one.id === current?.id)));
  }

  function item(conversation, current) {
    const { id, title } = conversation;
    const link = h("a", { href: `#/chat/${id}`, "aria-current": current ? "true" : null, title }, title || "New conversation");
    return h("li", { class: isRunning(conversation) ? "running" : null }, link,
      iconButton("bin", `Delete ${title || "this conversation"}`, () => does.remove(conversation)));
  }
  return { element, scrim, update, toggle: () => setOpen(!element.classList.contains("open")) };
}
