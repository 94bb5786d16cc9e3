/**
 * The markdown that models write, as a tree: headings, lists, code, quotes, tables, emphasis, links.
 *
 *     "# Hi *you*"  ->  [{kind: "heading", level: 1, text: "Hi *you*", source: ...}]
 *
 * Pure text in, pure data out. Whatever is no markdown is text: no input is an error, and none takes longer than its
 * square, since this runs while text streams in. HTML is not known here, so it is text, too.
 */

const DEEPEST = 8; // blocks in blocks
const FARTHEST = 2000; // characters that one emphasis may span
const FENCE = /^(\s{0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** The blocks of a text. Each carries its `source`: equal source, equal block. */
export function blocks(text, depth = 0) {
  const lines = text.split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = readBlock(lines, at, depth);
    found.push({ ...block, source: lines.slice(at, next).join("\n") });
    at = next;
  }
  return found;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (depth < DEEPEST) {
    if (FENCE.test(line)) return readCode(lines, at);
    if (HEADING.test(line)) {
      const [, marks, text] = HEADING.exec(line);
      return [{ kind: "heading", level: marks.length, text }, at + 1];
    }
    if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
    if (QUOTE.test(line)) return readQuote(lines, at, depth);
    if (ITEM.test(line)) return readList(lines, at, depth);
    if (isTable(lines, at)) return readTable(lines, at);
  }
  return readParagraph(lines, at, depth);
}

/** A fence that is not closed yet runs to the end: its rest is still on its way. */
function readCode(lines, at) {
  const [, indent, fence, language] = FENCE.exec(lines[at]);
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const inside = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  return [{ kind: "code", language: language.trim(), text: inside.join("\n") }, Math.min(end + 1, lines.length)];
}

function readQuote(lines, at, depth) {
  const inside = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end += 1) inside.push(QUOTE.exec(lines[end])[1]);
  return [{ kind: "quote", blocks: blocks(inside.join("\n"), depth + 1) }, end];
}

/** Items of one kind; deeper lines belong to the item above them. */
function readList(lines, at, depth) {
  const [, first, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  let inset = 0;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const indent = line.length - line.trimStart().length;
    if (item && indent < first.length + 2 && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== ordered || indent < first.length) break;
      inset = indent + item[2].length + Math.min(item[3].length, 4);
      items.push([item[4]]);
    } else if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      if (!next.trim() || (!ITEM.test(next) && next.length - next.trimStart().length <= first.length)) break;
      items.at(-1).push("");
    } else if (indent > first.length) items.at(-1).push(line.slice(Math.min(indent, inset)));
    else break;
  }
  const inside = items.map((lines) => blocks(lines.join("\n"), depth + 1));
  return [{ kind: "list", ordered, start: ordered ? Number.parseInt(mark, 10) : 1, items: inside }, end];
}

const isTable = (lines, at) => lines[at].includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-");

function readTable(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const right = cells(lines[at + 1]).map((cell) => cell.endsWith(":"));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) rows.push(cells(lines[end]));
  return [{ kind: "table", head: cells(lines[at]), right, rows }, end];
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  const begins = (line) => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || ITEM.test(line);
  while (end < lines.length && lines[end].trim() && !(depth < DEEPEST && begins(lines[end]))) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).join("\n") }, end];
}

// -- inside a line --------------------------------------------------------------------------------

const PAIRS = [["***", "both"], ["**", "strong"], ["__", "strong"], ["~~", "strike"], ["*", "em"], ["_", "em"]];
const ADDRESS = /https?:\/\/[^\s<>"']*[^\s<>"'.,;:!?)\]*_~`]/y;
const ESCAPED = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;

/** The parts of a text: {kind: text | code | strong | em | both | strike | link, ...}. */
export function inline(text, depth = 0) {
  const parts = [];
  let plain = 0;
  let at = 0;
  while (at < text.length) {
    const found = depth < DEEPEST ? readPart(text, at, depth) : null;
    if (!found) {
      at += text[at] === "`" ? runOf(text, at) : 1;
      continue;
    }
    if (at > plain) parts.push({ kind: "text", text: text.slice(plain, at) });
    parts.push(found.part);
    at = plain = found.end;
  }
  if (plain < text.length) parts.push({ kind: "text", text: text.slice(plain) });
  return parts;
}

function readPart(text, at, depth) {
  const sign = text[at];
  if (sign === "`") return readSpan(text, at);
  if (sign === "\\" && ESCAPED.test(text[at + 1] ?? "")) return { part: { kind: "text", text: text[at + 1] }, end: at + 2 };
  if (sign === "[" || (sign === "!" && text[at + 1] === "[")) return readLink(text, at, depth);
  if (sign === "h") return readAddress(text, at);
  if (sign === "*" || sign === "_" || sign === "~") return readEmphasis(text, at, depth);
  return null;
}

const runOf = (text, at) => {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
};

/** Code: closed by as many backticks as it was opened with. */
function readSpan(text, at) {
  const ticks = runOf(text, at);
  for (let close = text.indexOf("`", at + ticks); close >= 0; ) {
    const run = runOf(text, close);
    if (run === ticks) return { part: { kind: "code", text: text.slice(at + ticks, close).trim() }, end: close + run };
    close = text.indexOf("`", close + run);
  }
  return null;
}

function readEmphasis(text, at, depth) {
  for (const [mark, kind] of PAIRS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    const inWord = mark[0] === "_" && at > 0 && WORD.test(text[at - 1]);
    if (inWord || !text[from] || /\s/.test(text[from]) || text[from] === mark[0]) continue;
    const close = closing(text, from, mark);
    if (close > from) return { part: { kind, parts: inline(text.slice(from, close), depth + 1) }, end: close + mark.length };
  }
  return null;
}

/** Where the mark ends what it began: not after a space, not inside a word (for _), not half of a longer mark. */
function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from); at >= 0 && at < from + FARTHEST; at = text.indexOf(mark, at + 1)) {
    const after = text[at + mark.length] ?? "";
    if (mark.length === 1 && (after === mark || text[at - 1] === mark)) continue;
    if (/\s/.test(text[at - 1]) || (mark[0] === "_" && WORD.test(after))) continue;
    return at;
  }
  return -1;
}

/** [label](address); a picture is a link, too, because fetching it would tell somebody that it was read. */
function readLink(text, at, depth) {
  const open = text[at] === "!" ? at + 2 : at + 1;
  const middle = text.indexOf("](", open);
  const close = middle < 0 ? -1 : text.indexOf(")", middle);
  if (close < 0 || text.slice(open, middle).includes("\n\n")) return null;
  const address = safeAddress(text.slice(middle + 2, close).trim().split(/\s/)[0]);
  if (!address) return null;
  const label = text.slice(open, middle) || address;
  return { part: { kind: "link", address, parts: inline(label, depth + 1) }, end: close + 1 };
}

function readAddress(text, at) {
  ADDRESS.lastIndex = at;
  const [found] = ADDRESS.exec(text) ?? [];
  const address = found && safeAddress(found);
  return address ? { part: { kind: "link", address, parts: [{ kind: "text", text: found }] }, end: at + found.length } : null;
}

/** Only what opens a page or a letter: never javascript:, data: or a path on this server. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
