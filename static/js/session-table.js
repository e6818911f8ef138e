// The table of recent sessions.

import { h, keyed, setAttribute, setText } from "./dom.js";
import { ago, count, UNKNOWN } from "./format.js";

const STATES = {
  running: ["moving", "answering"],
  done: ["ok", "idle"],
  cancelled: ["", "stopped"],
  failed: ["bad", "failed"],
};

const COLUMNS = [
  ["title", "Session"],
  ["model", "Model"],
  ["engine", "Engine"],
  ["turns", "Turns"],
  ["input", "Tokens in"],
  ["output", "Tokens out"],
  ["active", "Last active"],
  ["state", "State"],
];
const NUMBERS = new Set(["turns", "input", "output"]);

function createRow() {
  const cells = COLUMNS.map(([name, label]) =>
    h("td", { class: `cell-${name}${NUMBERS.has(name) ? " number" : ""}`, "data-label": label }, name === "state" ? h("span", { class: "state" }) : ""));
  return h("tr", { "data-testid": "session-row" }, cells);
}

/** The title, as a link to the session's page for those who may open it. */
function updateTitle(cell, text, key) {
  if (!key) {
    setText(cell, text);
    return;
  }
  const href = `/sessions/${key}/`;
  const link = cell.querySelector("a") ?? h("a", {});
  if (link.parentNode !== cell) cell.replaceChildren(link);
  setAttribute(link, "href", href);
  setText(link, text);
}

function updateRow(row, { chat, key, now }) {
  const [title, model, engine, turns, input, output, active, state] = row.cells;
  updateTitle(title, chat.title || `Session ${chat.id}`, key);
  setAttribute(title, "title", `Session ${chat.id}, from the ${chat.source === "api" ? "API" : chat.source}`);
  setText(model, chat.model_name || UNKNOWN);
  setText(engine, chat.split_engines.join(" → ") || chat.engine_name || UNKNOWN);
  setAttribute(engine, "title", chat.split_engines.length ? `${chat.split_engines[0]} computes the last prompt, ${chat.split_engines[1]} writes the answer` : null);
  setText(turns, count(chat.turn_count));
  setText(input, count(chat.prompt_tokens));
  setText(output, count(chat.completion_tokens));
  setText(active, ago(now - chat.last_active_at));
  const [tone, word] = STATES[chat.state] ?? ["", "new"];
  setAttribute(state.firstChild, "data-tone", tone);
  setText(state.firstChild, word);
}

/** `pages` are the addresses of those that this user may open. */
export function drawSessions(body, sessions, pages, now) {
  const keys = new Map(pages.map((page) => [page.id, page.key]));
  keyed(body, sessions.map((chat) => ({ chat, key: keys.get(chat.id), now })), ({ chat }) => chat.id, createRow, updateRow);
}
