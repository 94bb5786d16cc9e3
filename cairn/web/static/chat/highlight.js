/** Code with colours: comments, strings, numbers and words of the language. Good enough for most languages, exact for none. */

import { h } from "../dom.js";

const HASH = ["python", "py", "bash", "sh", "shell", "zsh", "ruby", "yaml", "toml", "r", "perl", "makefile", "dockerfile"];
const PLAIN = ["", "text", "txt", "console", "output", "markdown", "md"];
const WORDS = new Set(("and as async await break case catch class const continue def defer del do elif else enum except export extends "
  + "false final finally fn for from func function go if impl import in interface is lambda let loop match mod mut new nil none not null "
  + "or package pass private pub public raise return self static struct super switch this throw trait true try type use var void while "
  + "with yield select insert update delete where join create table False None True").split(" "));
const STRING = String.raw`"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|${"`"}(?:\\.|[^${"`"}\\])*${"`"}`;
const SLASHES = String.raw`\/\/.*|\/\*[\s\S]*?\*\/`;

/** Nodes whose text together is `text`. */
export function highlighted(text, language) {
  const name = (language ?? "").toLowerCase();
  if (PLAIN.includes(name)) return [text];
  const comment = HASH.includes(name) ? "#.*" : name === "sql" || name === "lua" ? "--.*" : SLASHES;
  const parts = new RegExp(`(?<comment>${comment})|(?<string>${STRING})|(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let at = 0;
  for (const { 0: found, index, groups } of text.matchAll(parts)) {
    const kind = Object.keys(groups).find((each) => groups[each] !== undefined);
    if (kind === "word" && !WORDS.has(found)) continue;
    nodes.push(text.slice(at, index), h("i", { class: `in-${kind}` }, found));
    at = index + found.length;
  }
  return [...nodes, text.slice(at)];
}
