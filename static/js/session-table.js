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

function updateRow(row, { chat, now }) {
  const [title, model, engine, turns, input, output, active, state] = row.cells;
  setText(title, chat.title || `Session ${chat.id}`);
  setAttribute(title, "title", `Session ${chat.id}, from the ${chat.source === "api" ? "API" : chat.source}`);
  setText(model, chat.model_name || UNKNOWN);
  setText(engine, chat.engine_name || UNKNOWN);
  setText(turns, count(chat.turn_count));
  setText(input, count(chat.prompt_tokens));
  setText(output, count(chat.completion_tokens));
  setText(active, ago(now - chat.last_active_at));
  const [tone, word] = STATES[chat.state] ?? ["", "new"];
  setAttribute(state.firstChild, "data-tone", tone);
  setText(state.firstChild, word);
}

export function drawSessions(body, sessions, now) {
  keyed(body, sessions.map((chat) => ({ chat, now })), ({ chat }) => chat.id, createRow, updateRow);
}
