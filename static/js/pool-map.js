// The machines as they stand: hosts, on them devices filled with the memory in use, on those the engines and their slots.

import { h, keyed, setAttribute, setText } from "./dom.js";
import { createDeviceFacts, updateDeviceFacts } from "./device-facts.js";
import { age, bytes, bytesOf, count, plural, rate } from "./format.js";
import { createDrainLink, createDuty, DUTY_WORDS, updateDrainLink, updateDuty } from "./host-duty.js";

const ENGINE_TONES = { ready: "ok", starting: "moving", draining: "moving", stopping: "moving", unhealthy: "warn", failed: "bad", stopped: "" };

const DRAINABLE = new Set(["ready", "unhealthy", "draining"]);

/**
 * Draws all hosts into `parent`. `pool` holds the engines' cards, the stores, the site's release, `now` by the server's clock
 * and `staleS`: numbers older than that are grey and say their age.
 */
export function drawHosts(parent, hosts, pool) {
  const storeOf = (hostId) => pool.stores.find((store) => store.host_id === hostId) ?? null;
  const cardsOf = (hostId) => pool.engines.filter((card) => card.engine.host_id === hostId);
  for (const ghost of parent.querySelectorAll(".ghost")) ghost.remove();
  keyed(parent, hosts.map((host) => ({ ...pool, host, hosts, cards: cardsOf(host.id), store: storeOf(host.id) })), ({ host }) => host.id, createHost, updateHost);
}

function part(root, name) {
  return root.querySelector(`:scope [data-part="${name}"]`);
}

/** The age in seconds when a measurement is too old to be called current, else null. */
function staleAge(lastSeenAt, { now, staleS }) {
  const seconds = lastSeenAt === null ? null : now - lastSeenAt;
  return seconds !== null && seconds > staleS ? seconds : null;
}

// --- hosts ---

function createHost() {
  return h("article", { class: "host", "data-testid": "host" },
    h("header", { class: "host-head" },
      h("h2", { "data-part": "name" }),
      h("span", { class: "state", "data-part": "state" }),
      h("span", { class: "state", "data-part": "duty", "data-tone": "warn", "data-testid": "host-duty-word" }),
      createDuty(),
      h("p", { class: "host-facts", "data-part": "facts" }),
      h("p", { class: "host-facts", "data-part": "store", "data-testid": "host-store" }),
      h("p", { class: "host-facts", "data-part": "release", "data-testid": "host-release" })),
    h("div", { class: "devices", "data-part": "devices" }),
    h("p", { class: "device-none", "data-part": "no-devices" }, "It has told of no device yet."));
}

function updateHost(element, context) {
  const { host, cards } = context;
  const stale = staleAge(host.last_seen_at, context);
  const lost = host.state === "lost";
  setText(part(element, "name"), host.name);
  const state = part(element, "state");
  const silent = host.last_seen_at === null;
  setAttribute(state, "data-tone", lost ? "bad" : stale === null && !silent ? "ok" : "");
  setText(state, lost ? `lost${stale === null ? "" : ` ${age(stale)} ago`}` : silent ? "no report yet" : stale === null ? "up" : `last report ${age(stale)} ago`);
  const duty = part(element, "duty");
  duty.hidden = host.duty === "active";
  setText(duty, DUTY_WORDS[host.duty] ?? host.duty);
  const facts = [host.cpu_model];
  if (host.cpu_count) facts.push(plural(host.cpu_count, "core"));
  if (host.load_1m !== null) facts.push(`load ${host.load_1m.toFixed(2)}`);
  if (host.memory_available_bytes !== null) facts.push(`${bytes(host.memory_available_bytes)} of ${bytes(host.memory_total_bytes)} free`);
  if (host.driver_version) facts.push(`driver ${host.driver_version}`);
  setText(part(element, "facts"), facts.filter(Boolean).join(" · "));
  const { store } = context;
  setText(part(element, "store"), storeFacts(context));
  part(element, "store").hidden = store === null;
  part(element, "store").classList.toggle("stale", store !== null && (store.last_seen_at === null || context.now - store.last_seen_at > context.staleS));
  const release = part(element, "release");
  release.hidden = !host.version_differs && !host.schema_differs;
  setText(release, `Release ${host.version}, this site's is ${context.release}${host.schema_differs ? "; their tables differ" : ""}`);
  updateDuty(element, context);
  element.classList.toggle("stale-block", stale !== null);
  const known = new Set(host.gpus.map((gpu) => gpu.id));
  const fallback = host.gpus.find((gpu) => gpu.kind === "cpu") ?? host.gpus[0];
  const placed = (gpu) => cards.filter(({ engine }) => (known.has(engine.gpu_id) ? engine.gpu_id : fallback?.id) === gpu.id);
  keyed(part(element, "devices"), host.gpus.map((gpu) => ({ ...context, gpu, cards: placed(gpu) })), ({ gpu }) => gpu.id, createDevice, updateDevice);
  part(element, "no-devices").hidden = host.gpus.length > 0;
}

/** The host's store in a line: how full it is, what it holds, and how often that was of use. */
function storeFacts({ store, now, staleS }) {
  if (store === null) return "";
  if (store.last_seen_at === null) return `Store ${store.state}`;
  const facts = [`Store ${bytesOf(store.used_bytes, store.capacity_bytes)}`, plural(store.snapshots, "snapshot")];
  if (store.dedup_ratio !== null) facts.push(`each byte named ${store.dedup_ratio.toFixed(1)}×`);
  if (store.hit_share !== null) facts.push(`${Math.round(store.hit_share * 100)} % found`);
  if (store.evictions) facts.push(`${count(store.evictions)} evicted`);
  if (store.errors) facts.push(plural(store.errors, "error"));
  if (store.state !== "ready") facts.push(store.state);
  if (now - store.last_seen_at > staleS) facts.push(`as of ${age(now - store.last_seen_at)} ago`);
  return facts.join(" · ");
}

// --- devices ---

function createDevice({ gpu }) {
  return h("section", { class: "device", "data-kind": gpu.kind, "data-testid": "device" },
    h("div", { class: "fill", "data-part": "fill", "aria-hidden": "true" }),
    h("header", { class: "device-head" },
      h("h3", { "data-part": "name" }),
      h("p", { class: "device-kind", "data-part": "kind" }),
      h("p", { class: "memory", "data-part": "memory" })),
    h("div", { class: "engines", "data-part": "engines" }),
    h("p", { class: "device-empty", "data-part": "empty" }, "No engine on this device."),
    createDrainLink(),
    createDeviceFacts());
}

function updateDevice(element, context) {
  const { gpu, cards } = context;
  const stale = staleAge(gpu.last_seen_at, context);
  const known = gpu.memory_used_bytes !== null && gpu.memory_total_bytes > 0;
  const share = known ? Math.min(1, gpu.memory_used_bytes / gpu.memory_total_bytes) : 0;
  const fill = part(element, "fill");
  fill.style.setProperty("--share", share.toFixed(3));
  fill.hidden = !known;
  setText(part(element, "name"), gpu.name || (gpu.kind === "cpu" ? "CPU" : `GPU ${gpu.index}`));
  setText(part(element, "kind"), gpu.kind === "cpu" ? `CPU · ${gpu.arch}` : `GPU ${gpu.index} · ${gpu.arch}`);
  setText(part(element, "memory"), known ? `${bytesOf(gpu.memory_used_bytes, gpu.memory_total_bytes)} · ${Math.round(share * 100)} %` : "memory not measured");
  updateDeviceFacts(element, gpu, stale);
  part(element, "empty").hidden = cards.length > 0;
  // Where a card has one engine, that one's own link does the same.
  updateDrainLink(element, "card", gpu.id, cards.filter(({ engine }) => DRAINABLE.has(engine.state)).length > 1 ? "Drain the whole card…" : "");
  element.classList.toggle("stale-block", stale !== null);
  keyed(part(element, "engines"), cards.map((card) => ({ ...context, card })), ({ card }) => card.engine.id, createEngine, updateEngine);
}

// --- engines and their slots ---

function createEngine() {
  return h("article", { class: "engine", "data-testid": "engine-card" },
    h("header", { class: "engine-head" },
      h("h3", { "data-part": "name" }),
      h("span", { class: "state", "data-part": "state", "data-testid": "engine-state" }),
      createDrainLink()),
    h("p", { class: "engine-model", "data-part": "model" }),
    h("p", { class: "engine-error", "data-part": "error" }),
    h("ul", { class: "slots", "data-part": "slots", "aria-label": "Slots" }),
    h("p", { class: "engine-facts", "data-part": "facts" }));
}

function updateEngine(element, context) {
  const { engine, cells, cells_stale_since: staleSince, waits } = context.card;
  setAttribute(element, "data-state", waits ? "waits" : engine.state);
  setText(part(element, "name"), engine.name);
  const state = part(element, "state");
  const closed = engine.state === "ready" && !engine.takes_new;
  setAttribute(state, "data-tone", closed || waits ? "warn" : ENGINE_TONES[engine.state] ?? "");
  setText(state, closed ? "takes nothing new" : waits ? "waits" : engine.state);
  updateDrainLink(element, "engine", engine.id, DRAINABLE.has(engine.state) ? (engine.takes_new ? "Drain…" : "Serve again…") : "");
  setText(part(element, "model"), [engine.model_name, engine.quantization].filter(Boolean).join(" · "));
  const error = part(element, "error");
  error.hidden = !engine.last_error || engine.state === "ready";
  setText(error, engine.last_error);
  const slots = part(element, "slots");
  slots.hidden = cells.length === 0;
  slots.classList.toggle("stale-block", staleSince !== null);
  keyed(slots, cells, (cell) => cell.id, createSlot, updateSlot);
  const facts = [];
  if (staleSince !== null) facts.push(`slots as of ${age(context.now - staleSince)} ago`);
  if (!cells.length) facts.push(plural(engine.slots, "slot"));
  facts.push(`${count(engine.context_tokens)} tokens of context each`);
  if (engine.threads) facts.push(plural(engine.threads, "thread"));
  if (engine.state === "ready" && engine.ready_at !== null) facts.push(`ready for ${age(context.now - engine.ready_at)}`);
  if (engine.restarts) facts.push(plural(engine.restarts, "restart"));
  setText(part(element, "facts"), facts.join(" · "));
}

function createSlot() {
  return h("li", { class: "slot", "data-testid": "slot-cell" },
    h("span", { class: "slot-state", "data-part": "state" }),
    h("span", { class: "slot-figure", "data-part": "figure" }),
    h("span", { class: "slot-context", "aria-hidden": "true" }, h("i", { "data-part": "context" })));
}

function updateSlot(element, cell) {
  const words = { idle: "idle", prefill: "reading", decode: "writing", restore: "receiving", export: "sending" };
  setAttribute(element, "data-state", cell.state);
  element.style.setProperty("--progress", cell.progress ?? 0);
  setText(part(element, "state"), words[cell.state] ?? cell.state);
  let figure = "";
  if (cell.state === "prefill") figure = cell.progress === null ? "" : `${Math.round(cell.progress * 100)} %`;
  if (cell.state === "decode") figure = `${rate(cell.tokens_per_s)} t/s`;
  setText(part(element, "figure"), figure);
  const share = cell.context_tokens ? Math.min(1, cell.context_used_tokens / cell.context_tokens) : 0;
  part(element, "context").style.setProperty("--share", share.toFixed(3));
  setAttribute(element, "title", `Slot ${cell.id}: ${count(cell.context_used_tokens)} of ${count(cell.context_tokens)} tokens of context in use`);
}
