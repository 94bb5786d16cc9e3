/**
 * A conversation as a tree, so that nothing is lost: asking again and editing add a branch beside the old one.
 *
 *     user "hi" -- assistant "hello"          leaf: the end of the branch that is shown
 *              `-- assistant "good day"  <- leaf
 *     user "hi!" (edited) ...
 *
 * Pure: no screen, no storage, no server. A node is {id, parent, role, content, ...}.
 */

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");

export function newConversation(parameters = {}) {
  return { id: newId(), title: "", changed: Date.now(), parameters: { ...parameters }, nodes: {}, leaf: null };
}

/** Adds a node below `parent`, and shows it. */
export function grow(conversation, parent, node) {
  const added = { id: newId(), parent, content: "", at: Date.now(), ...node };
  conversation.nodes[added.id] = added;
  conversation.leaf = added.id;
  conversation.changed = Date.now();
  if (!conversation.title && added.role === "user") conversation.title = titleOf(added.content);
  return added;
}

/** From the first message to the leaf. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) found.unshift(node);
  return found;
}

/** The node and its alternatives, oldest first. */
export function versions(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent).sort((a, b) => a.at - b.at);
}

/** Shows the branch through `node`, down to its newest end. */
export function follow(conversation, node) {
  for (let end = node; end; ) {
    conversation.leaf = end.id;
    const below = Object.values(conversation.nodes).filter((other) => other.parent === end.id);
    end = below.reduce((newest, other) => (!newest || other.at >= newest.at ? other : newest), null);
  }
}

/** What the server is sent: everything said before `node`, less answers that never came and what it refused to read. */
export function messagesBefore(conversation, node) {
  const said = path(conversation, node.parent);
  const refused = (at) => said[at + 1]?.error?.kind === "refused" && !said[at + 1].content;
  const sent = said.filter(({ role, content }, at) => (role === "user" ? !refused(at) : content));
  const messages = sent.map(({ role, content, images }) => ({ role, content: images ? withPictures(content, images) : content }));
  const system = conversation.parameters.system?.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** The parts of a message, pictures first. */
function withPictures(text, images) {
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0] || "A picture";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}
