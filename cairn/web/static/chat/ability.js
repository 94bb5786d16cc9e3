/**
 * What this model can do with text, found out by asking it to tokenize a message.
 *
 *     chat      it has a chat template
 *     text      it has none: it goes on writing where a text ends
 *     nothing   it has no tokenizer: only token ids, and so nothing for this page
 */

import { ask, Trouble } from "../server.js";

/** {mode, reason}; the reason is the server's own. Trouble other than a refusal is the caller's. */
export async function findAbility() {
  try {
    await ask("/tokenize", { body: { messages: [{ role: "user", content: "hello" }] } });
    return { mode: "chat", reason: "" };
  } catch (error) {
    if (!(error instanceof Trouble) || error.kind !== "refused") throw error;
    if (error.code === "no_tokenizer") return { mode: "nothing", reason: error.message };
    return /template/.test(error.message) ? { mode: "text", reason: error.message } : { mode: "chat", reason: "" };
  }
}

/** What the person is told about it, or nothing. */
export function abilityNotice({ mode, reason }) {
  if (mode === "chat") return null;
  const said = reason.split(";")[0];
  if (mode === "text") return `${said}. So it does not answer: write the beginning of a text, and it goes on from there.`;
  return `${said}. There is nothing to chat with here; the API takes token ids at /v1/completions.`;
}
