/** To the clipboard; also on plain http, where browsers offer the new way to nobody. */

import { icon, iconButton } from "./dom.js";

async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "off-screen";
  document.body.append(area);
  area.select();
  const fine = document.execCommand("copy");
  area.remove();
  if (!fine) throw new Error("the browser did not allow it");
}

/** A button that copies what `text()` says, and shows that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    let worked = true;
    await copy(text()).catch(() => (worked = false));
    button.replaceChildren(icon(worked ? "done" : "close"));
    button.setAttribute("aria-label", worked ? "Copied" : "Copying was not allowed");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}
