/**
 * Conversations in this browser (localStorage), each under a key of its own, so that a word costs one small write.
 *
 * Where nothing can be stored (a private window, a full disk) the page goes on, and says once that it will forget.
 */

const PREFIX = "cairn.chat.";
const LAST = "cairn.parameters";

export class Shelf {
  #memory = new Map();
  onFull = () => {};

  constructor() {
    for (const key of this.#keys()) {
      const read = parse(localStorage.getItem(key));
      if (read?.id && read.nodes) this.#memory.set(read.id, rested(read));
    }
  }

  /** The last changed first. */
  all() {
    return [...this.#memory.values()].sort((a, b) => b.changed - a.changed);
  }

  get(id) {
    return this.#memory.get(id) ?? null;
  }

  put(conversation) {
    this.#memory.set(conversation.id, conversation);
    this.#write(PREFIX + conversation.id, conversation);
  }

  remove(id) {
    this.#memory.delete(id);
    try {
      localStorage.removeItem(PREFIX + id);
    } catch {
      // it was never stored
    }
  }

  /** What another tab wrote; true where something changed. */
  takeOver({ key, newValue }) {
    if (!key?.startsWith(PREFIX)) return false;
    const read = parse(newValue);
    if (read) this.#memory.set(read.id, read);
    else this.#memory.delete(key.slice(PREFIX.length));
    return true;
  }

  /** The parameters that a new conversation begins with: the last ones, or null. */
  get parameters() {
    try {
      return parse(localStorage.getItem(LAST));
    } catch {
      return null;
    }
  }

  set parameters(parameters) {
    this.#write(LAST, parameters);
  }

  #write(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
    } catch {
      this.onFull();
    }
  }

  #keys() {
    try {
      return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    } catch {
      return [];
    }
  }
}

/** An answer that was on its way when the page was left has stopped. */
function rested(conversation) {
  for (const node of Object.values(conversation.nodes)) if (node.status === "running") node.status = "stopped";
  return conversation;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
