/** Keys for the whole page, while nobody types; and the sheet that lists them. */

import { h } from "./dom.js";

/** `keys` is [[key, what it does, function], ...]; modifiers and text fields are left alone. */
export function installShortcuts(keys) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || typing(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    const found = keys.find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
}

const typing = (element) => element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName);

const FIXED = [["Enter", "send"], ["Shift Enter", "a new line"], ["Esc", "stop the answer, close what is open"]];

export function showShortcuts(keys) {
  const rows = [...FIXED, ...keys].map(([key, does]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, does)));
  const dialog = h("dialog", { class: "sheet small", "aria-label": "Keys" },
    h("form", { method: "dialog" },
      h("h2", {}, "Keys"),
      h("table", { class: "keys" }, h("tbody", {}, rows)),
      h("div", { class: "actions" }, h("button", { class: "strong-button" }, "Close"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
