/** Asks for the API key, once for all who wait for it. A question that was waved away is not asked again by itself. */

import { h, icon } from "./dom.js";
import { onKeyNeeded } from "./server.js";

let asking = null;

function question(reason) {
  const input = h("input", {
    type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-label": "API key",
  });
  const dialog = h("dialog", { class: "sheet small", "aria-labelledby": "key-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "key-title" }, icon("key"), "This server asks for a key"),
      h("p", { class: "soft" }, `${reason}. It is kept until this tab is closed.`),
      input,
      h("div", { class: "actions" },
        h("button", { type: "submit", value: "no", class: "plain-button", formnovalidate: true }, "Not now"),
        h("button", { type: "submit", value: "yes", class: "strong-button" }, "Use this key"))));
  // Enter in the field means the key, although the other button comes first.
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    if (input.value.trim()) dialog.close("yes");
  });
  return { dialog, input };
}

async function askForKey(reason) {
  const { dialog, input } = question(reason);
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
  await new Promise((closed) => dialog.addEventListener("close", closed, { once: true }));
  dialog.remove();
  return dialog.returnValue === "yes" ? input.value.trim() : null;
}

export function installAccess() {
  onKeyNeeded((reason) => {
    asking ??= askForKey(reason).finally(() => (asking = null));
    return asking;
  });
}
