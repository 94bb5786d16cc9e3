/** Who used what: tokens, device time and energy of each API key, asked for every other second while the page is seen. */

import { h } from "../dom.js";
import { count, DASH, figure, seconds } from "../format.js";
import { ask } from "../server.js";

const EVERY_MS = 2000;
const HEADINGS = ["Key", "Requests", "Prompt", "Cached", "Output", "Device", "Energy", "Left today"];

export function keysTable() {
  const rows = h("tbody", {});
  const heading = h("tr", {}, HEADINGS.map((name) => h("th", { scope: "col" }, name)));
  const element = h("table", { class: "keys" }, h("thead", {}, heading), rows);
  let asked = 0;

  async function refresh() {
    if (Date.now() - asked < EVERY_MS) return;
    asked = Date.now();
    try {
      const usage = await (await ask("/cairn/usage", {})).json();
      rows.replaceChildren(...usage.keys.map(row));
    } catch {
      asked = Number.MAX_SAFE_INTEGER; // a server that counts nothing is not asked again
    }
  }
  return { element, refresh };
}

function row(key) {
  const joules = key.joules == null ? DASH : `${figure(key.joules)} J`;
  const left = key.today_left == null ? DASH : count(key.today_left);
  const tokens = [key.requests, key.prompt_tokens, key.cached_tokens, key.output_tokens].map(count);
  return h("tr", {}, [key.key, ...tokens, seconds(key.device_s), joules, left].map((text) => h("td", {}, text)));
}
