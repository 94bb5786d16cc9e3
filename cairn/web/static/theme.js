/** Light, dark, or what the system says. `first_paint.js` sets it before the page is drawn; this is the button. */

import { iconButton, icon } from "./dom.js";

const NAME = "cairn.theme";
const THEMES = ["system", "light", "dark"];
const ICONS = { system: "system", light: "sun", dark: "moon" };

const current = () => document.documentElement.dataset.theme ?? "system";

function choose(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    if (theme === "system") localStorage.removeItem(NAME);
    else localStorage.setItem(NAME, theme);
  } catch {
    // it lasts until the page is left
  }
  window.dispatchEvent(new Event("cairn:theme"));
}

/** The button, which goes round the three. */
export function themeButton() {
  const button = iconButton("system", "", () => {
    choose(THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length]);
    show();
  });
  const show = () => {
    const theme = current();
    button.replaceChildren(icon(ICONS[theme]));
    button.title = `Theme: ${theme} (t)`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("cairn:theme")));
  return button;
}

/** What a custom property means right now, as a colour for a canvas, which cannot read var(). */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
