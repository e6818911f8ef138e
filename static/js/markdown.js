// A small part of Markdown, built as DOM nodes: fences, headings, lists, paragraphs, `code`, **bold**, *emphasis*.
// Model text is untrusted, so it becomes text nodes only; links and images stay the plain text they are.

import { copyButton } from "./copy.js";
import { h } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** Splits text into blocks {kind, at, …}; `at` is the offset of the block's first character. */
function blocksOf(text) {
  const blocks = [];
  let open = null;
  let at = 0;
  for (const line of text.split("\n")) {
    open = takeLine(blocks, open, line, at);
    at += line.length + 1;
  }
  return blocks;
}

/** Adds one line to the open block or starts another; returns the block that stays open, or null. */
function takeLine(blocks, open, line, at) {
  if (open?.kind === "code") {
    const fence = FENCE.exec(line);
    if (fence && !fence[2] && fence[1][0] === open.fence[0] && fence[1].length >= open.fence.length) return null;
    open.lines.push(line);
    return open;
  }
  const start = (block) => {
    blocks.push({ at, ...block });
    return blocks.at(-1);
  };
  const fence = FENCE.exec(line);
  if (fence) return start({ kind: "code", fence: fence[1], language: fence[2], lines: [] });
  if (!line.trim()) return open?.kind === "list" ? open : null;
  const heading = HEADING.exec(line);
  if (heading) {
    start({ kind: "heading", level: heading[1].length, text: heading[2] });
    return null;
  }
  const item = ITEM.exec(line);
  if (item) {
    const ordered = /\d/.test(item[2]);
    const entry = { indent: item[1].length, ordered, first: ordered ? parseInt(item[2], 10) : 1, text: item[3] };
    if (open?.kind === "list" && (open.items[0].ordered === ordered || entry.indent > open.items[0].indent)) {
      open.items.push(entry);
      return open;
    }
    return start({ kind: "list", items: [entry] });
  }
  if (open?.kind === "list" && /^\s/.test(line)) {
    open.items.at(-1).text += `\n${line.trim()}`;
    return open;
  }
  if (open?.kind === "paragraph") {
    open.text += `\n${line}`;
    return open;
  }
  return start({ kind: "paragraph", text: line });
}

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|(?<![\w*])\*([^\s*](?:[^*]*?[^\s*])?)\*(?![\w*])/g;

function inline(text, depth = 0) {
  if (depth > 3) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    if (match[2] !== undefined) nodes.push(h("code", {}, match[2]));
    else if (match[3] !== undefined) nodes.push(h("strong", {}, inline(match[3], depth + 1)));
    else nodes.push(h("em", {}, inline(match[4], depth + 1)));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** Items of one list, deeper ones nested in the item before them. */
function listOf(items) {
  const [head] = items;
  const list = h(head.ordered ? "ol" : "ul", { start: head.ordered && head.first !== 1 ? head.first : null });
  let deeper = [];
  const nest = () => {
    if (deeper.length) list.lastChild.append(listOf(deeper));
    deeper = [];
  };
  for (const item of items) {
    if (list.lastChild && item.indent > head.indent) {
      deeper.push(item);
      continue;
    }
    nest();
    list.append(h("li", {}, inline(item.text)));
  }
  nest();
  return list;
}

function elementOf(block) {
  if (block.kind === "code") {
    const source = block.lines.join("\n");
    const head = h("div", { class: "code-head" }, h("span", {}, block.language), copyButton(() => source));
    return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, source)));
  }
  // A message's headings stay below the page's own.
  if (block.kind === "heading") return h(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text));
  if (block.kind === "list") return listOf(block.items);
  return h("p", {}, inline(block.text));
}

/** Text that grows at its end. Finished blocks keep their elements, so an answer of any length costs only its last block. */
export class GrowingMarkdown {
  constructor(parent) {
    this.parent = parent;
    this.text = "";
    this.openAt = 0;
    this.openElement = null;
  }

  append(text) {
    this.text += text;
    const blocks = blocksOf(this.text.slice(this.openAt));
    this.openElement?.remove();
    for (const block of blocks) {
      this.openElement = elementOf(block);
      this.parent.append(this.openElement);
    }
    if (blocks.length) this.openAt += blocks.at(-1).at;
  }
}
