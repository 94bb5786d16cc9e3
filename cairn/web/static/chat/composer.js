/** Where the person writes. Enter sends, Shift+Enter is a new line; while an answer runs, the button stops it. */

import { h, icon, iconButton } from "../dom.js";
import { makePictures } from "./pictures.js";

/** `does` is {send(text, pictures), stop(), parameters(), refuse(text)}. */
export function makeComposer(does) {
  const area = h("textarea", {
    rows: 1, placeholder: "Write to the model", "aria-label": "Message", enterkeyhint: "send", dir: "auto",
  });
  const button = h("button", { type: "submit", class: "send", "aria-label": "Send" }, icon("send"));
  const tune = iconButton("sliders", "Parameters (p)", does.parameters, { "data-does": "parameters" });
  const pictures = makePictures(() => grow(), does.refuse);
  const form = h("form", { class: "composer" }, tune, area, button);
  const element = h("div", { class: "writing" }, pictures.element, form);
  let running = false;
  let off = false;

  const grow = () => {
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, 220)}px`;
    button.disabled = off || (!running && !area.value.trim() && !pictures.count);
  };
  area.addEventListener("input", grow);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = area.value.trim();
    if (running) return does.stop();
    if ((!text && !pictures.count) || off) return;
    area.value = "";
    does.send(text, pictures.take());
  });
  grow();

  return {
    element,
    pictures,
    listen: (place) => pictures.listen(area, place),
    focus: () => area.focus({ preventScroll: true }),
    setRunning(now) {
      if (now === running) return;
      running = now;
      button.replaceChildren(icon(now ? "stop" : "send"));
      button.setAttribute("aria-label", now ? "Stop" : "Send");
      button.title = now ? "Stop (Esc)" : "Send (Enter)";
      button.classList.toggle("stops", now);
      grow();
    },
    /** For a model that cannot take text; the reason is told elsewhere. */
    setOff(now) {
      off = area.disabled = now;
      grow();
    },
    setHint: (text) => (area.placeholder = text),
  };
}
