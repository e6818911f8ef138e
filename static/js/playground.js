// The playground: sends the conversation over its WebSocket, draws the answer as it comes.

import { Conversation, randomName } from "./conversation.js";
import { h, setAttribute, setText } from "./dom.js";
import { count } from "./format.js";
import { LiveSocket } from "./live-socket.js";
import { MessageView, statsLine } from "./message-view.js";

const MAX_MESSAGE_BYTES = 1024 * 1024;
const MODELS_EVERY_MS = 10000;
const NEAR_END_PX = 80;
const SETTINGS = ["model", "system", "temperature", "max-tokens", "top-p"];
const MODEL_STATES = {
  ready: ["ok", "ready"],
  starting: ["moving", "loading"],
  unhealthy: ["warn", "not answering"],
  draining: ["", "finishing"],
  stopping: ["", "stopping"],
  stopped: ["", "stopped"],
  failed: ["bad", "failed"],
  none: ["", "no engine"],
};

const byId = (id) => document.getElementById(id);
const conversation = new Conversation();
const views = [];
let models = [];
let running = null;
// Sent before the page was connected: goes out as soon as it is.
let isDue = false;

// --- the connection ---

const LOADING_STATES = {
  queued: "Waiting for another model's load to end",
  draining: "Waiting for other requests to end, then loading the model",
  starting: "Starting an engine for the model",
};

const handlers = {
  models: (message) => drawModels(message.models),
  loading: ({ loading }, run) => run.view.wait(LOADING_STATES[loading.state] ?? "Loading the model", loading.progress ?? null),
  start: (message, run) => {
    run.view.message.engine = message.engine;
    run.view.wait(`Waiting for ${message.engine}`);
  },
  progress: (message, run) => run.view.wait(`Reading ${count(message.processed)} of ${count(message.total)} tokens`, message.total ? message.processed / message.total : null),
  delta: (message, run) => run.view.append(message.text),
  reasoning: (message, run) => run.view.appendReasoning(message.text),
  done: (message, run) => {
    run.view.message.result = message;
    end(run);
  },
  error: (message, run) => {
    run.view.message.error = message.error;
    end(run);
  },
};

const socket = new LiveSocket("/ws/playground/", {
  onState(state) {
    setText(byId("ws-state"), state === "open" ? "Connected" : "Connecting");
    setAttribute(byId("ws-state"), "data-tone", state === "open" ? "ok" : "moving");
    setAttribute(byId("ws-state"), "data-ws-state", state === "open" ? "live" : state);
    if (state === "open") socket.send({ type: "models" });
    if (state === "closed" && running) {
      running.view.message.error = { message: "The connection broke, so this answer ended early.", hint: "The page reconnects by itself; then try again." };
      end(running);
    }
    drawControls();
    if (state === "open" && isDue) submit();
  },
  onMessage(message) {
    if (message.id) socket.send({ type: "ack", id: message.id });
    const handler = handlers[message.type];
    if (!handler) return;
    if (message.type === "models") handler(message);
    else if (running && (message.id === running.id || !message.id)) keepingTheEnd(() => handler(message, running));
  },
});

setInterval(() => document.visibilityState === "visible" && socket.send({ type: "models" }), MODELS_EVERY_MS);

// --- models ---

function drawModels(list) {
  models = list;
  const picker = byId("model");
  const wanted = conversation.settings.model;
  const options = list.map((model) => {
    const [, word] = MODEL_STATES[model.state] ?? ["", model.state];
    return { value: model.name, text: model.state === "ready" ? model.display_name : `${model.display_name} (${word})` };
  });
  if (!options.length) options.push({ value: "", text: "No model yet" });
  // Rebuilt only when something changed: an open list would close under the pointer.
  if (JSON.stringify(options) !== picker.dataset.options) {
    picker.dataset.options = JSON.stringify(options);
    picker.replaceChildren(...options.map(({ value, text }) => h("option", { value }, text)));
    const known = list.some((model) => model.name === wanted);
    picker.value = known ? wanted : (list.find((model) => model.is_default) ?? list[0])?.name ?? "";
  }
  conversation.settings.model = picker.value;
  drawModelState();
}

function drawModelState() {
  const model = models.find(({ name }) => name === byId("model").value);
  const [tone, word] = MODEL_STATES[model?.state] ?? ["", models.length ? "" : "pull one with manage.py pull"];
  setText(byId("model-state"), word);
  setAttribute(byId("model-state"), "data-tone", tone);
}

// --- asking and answering ---

/** Sends what the composer holds, now or once the page is connected; a change of the text takes the latter back. */
function submit() {
  const composer = byId("composer");
  const text = composer.value;
  if (running || !text.trim()) return;
  setDue(!socket?.isOpen);
  if (isDue) return;
  composer.value = "";
  fitComposer();
  say(text);
  composer.focus();
}

function say(text) {
  add({ role: "user", text });
  ask();
}

function setDue(due) {
  if (isDue === due) return;
  isDue = due;
  byId("due").hidden = !due;
  setText(byId("announcer"), due ? byId("due").textContent : "");
}

/** What was being written stays, unless the starter must wait for the connection in its place. */
function submitStarter(text) {
  if (running) return;
  if (socket.isOpen) {
    say(text);
    return;
  }
  byId("composer").value = text;
  fitComposer();
  submit();
}

function ask() {
  const body = conversation.body();
  const view = add({ role: "assistant", text: "" });
  const message = { type: "chat", id: randomName(), conversation: conversation.key, body };
  running = { id: message.id, view };
  view.wait("Sending");
  if (new TextEncoder().encode(JSON.stringify(message)).length > MAX_MESSAGE_BYTES) {
    view.message.error = { message: "The conversation is over 1 MB, more than the server takes.", hint: "Clear it and start anew." };
    end(running);
  } else if (!socket.send(message)) {
    view.message.error = { message: "There is no connection to the server.", hint: "The page reconnects by itself; then try again." };
    end(running);
  }
  drawControls();
  scrollToEnd();
}

function stop() {
  if (running) socket.send({ type: "stop", id: running.id });
}

function end(run) {
  running = null;
  run.view.finish();
  conversation.save();
  drawControls();
  const { error } = run.view.message;
  setText(byId("announcer"), error ? error.message : `Answer complete. ${statsLine(run.view.message)}`);
}

function regenerate() {
  if (running || conversation.messages.at(-1)?.role !== "assistant") return;
  conversation.messages.pop();
  views.pop().element.remove();
  ask();
}

function clear() {
  stop();
  running = null;
  conversation.clear();
  views.length = 0;
  byId("messages").replaceChildren();
  drawControls();
  byId("composer").focus();
}

function add(message) {
  conversation.messages.push(message);
  conversation.save();
  return show(message);
}

function show(message) {
  const view = new MessageView(message, { onRegenerate: regenerate });
  views.push(view);
  byId("messages").append(view.element);
  return view;
}

// --- the page ---

function drawControls() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("send").disabled = !byId("composer").value.trim();
  byId("opening").hidden = conversation.messages.length > 0;
  byId("clear").disabled = conversation.messages.length === 0;
  for (const view of views) view.regenerate.hidden = view !== views.at(-1);
}

function scrollToEnd() {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

/** Runs a change and follows the text's end, unless the reader has scrolled up. */
function keepingTheEnd(change) {
  const area = byId("scroll");
  const near = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_END_PX;
  change();
  if (near) scrollToEnd();
}

function fitComposer() {
  const composer = byId("composer");
  composer.style.height = "auto";
  composer.style.height = `${composer.scrollHeight + 2}px`;
}

function bindSettings() {
  for (const id of SETTINGS) {
    const input = byId(id);
    if (conversation.settings[id] !== undefined && id !== "model") input.value = conversation.settings[id];
    const output = byId(`${id}-value`);
    const take = () => {
      if (id !== "model" || input.value) conversation.settings[id] = input.value;
      if (output) setText(output, Number(input.value).toFixed(2));
    };
    input.addEventListener("input", () => {
      take();
      conversation.save();
      if (id === "model") drawModelState();
    });
    take();
  }
}

function bindControls() {
  const composer = byId("composer");
  byId("composer-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  composer.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  composer.addEventListener("input", () => {
    setDue(false);
    fitComposer();
    drawControls();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  byId("stop").addEventListener("click", () => {
    stop();
    composer.focus();
  });
  byId("clear").addEventListener("click", clear);
  for (const starter of byId("starters").children) starter.addEventListener("click", () => submitStarter(starter.textContent));
  byId("settings-toggle").addEventListener("click", () => {
    const open = byId("settings").classList.toggle("open");
    setAttribute(byId("settings-toggle"), "aria-expanded", String(open));
  });
}

// What was already said of a running answer stays, also when the page is left in the middle of it.
addEventListener("pagehide", () => conversation.save());
bindSettings();
bindControls();
conversation.messages.forEach(show);
drawControls();
scrollToEnd();
