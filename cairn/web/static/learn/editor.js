/** Where code is written: Tab indents, the text is kept in this browser until it is reset, a line can be pointed at. */

import { h } from "../dom.js";

const KEY = "cairn.learn.code.";
const INDENT = "    ";

/** `name` is what the draft is kept under, `text` what it begins with. */
export function makeEditor(name, text, label) {
  const area = h("textarea", { class: "editor", spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off", rows: "18", "aria-label": label });
  area.value = localStorage.getItem(KEY + name) ?? text;
  const keep = () => localStorage.setItem(KEY + name, area.value);
  area.addEventListener("input", keep);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Tab" || event.shiftKey || event.altKey || event.ctrlKey || event.metaKey) return; // Shift+Tab leaves
    event.preventDefault();
    area.setRangeText(INDENT, area.selectionStart, area.selectionEnd, "end");
    keep();
  });
  return {
    element: area,
    get text() {
      return area.value;
    },
    reset() {
      localStorage.removeItem(KEY + name);
      area.value = text;
    },
    /** Selects a line, from 1. */
    show(number) {
      const lines = area.value.split("\n");
      const start = lines.slice(0, number - 1).reduce((sum, line) => sum + line.length + 1, 0);
      area.focus();
      area.setSelectionRange(start, start + (lines[number - 1] ?? "").length);
      area.scrollTop = (number - 4) * (area.scrollHeight / lines.length);
    },
  };
}
