// The dashboard: receives the pool's snapshots, draws them, and says how old they are.

import { drawActivity } from "./activity-plot.js";
import { h, keyed, setAttribute, setText } from "./dom.js";
import { age, bytesOf, count, plural, rate } from "./format.js";
import { LiveSocket } from "./live-socket.js";
import { drawHosts } from "./pool-map.js";
import { drawSessions } from "./session-table.js";

const STALE_S = 15;
const HISTORY_S = 300;

const byId = (id) => document.getElementById(id);
const pool = { snapshot: null, samples: [], takenAt: null, receivedAtMs: 0, connection: "connecting" };

/** Seconds since 1970 on the server's clock: the page's own clock may be wrong, so only its differences count. */
function serverNow() {
  return pool.takenAt + (performance.now() - pool.receivedAtMs) / 1000;
}

const socket = new LiveSocket("/ws/pool/", {
  onState(state) {
    pool.connection = state;
    drawConnection();
  },
  onMessage(frame) {
    pool.takenAt = frame.taken_at;
    pool.receivedAtMs = performance.now();
    if (frame.snapshot) pool.snapshot = frame.snapshot;
    const last = pool.samples.at(-1)?.at_s ?? 0;
    pool.samples.push(...frame.samples.filter((sample) => sample.at_s > last));
    while (pool.samples.length && pool.samples[0].at_s < frame.taken_at - HISTORY_S) pool.samples.shift();
    draw();
    drawActivity(pool.samples, frame.taken_at, HISTORY_S);
    socket.send({ type: "seen" });
  },
});

function drawConnection() {
  const element = byId("ws-state");
  const silentS = pool.takenAt === null ? null : (performance.now() - pool.receivedAtMs) / 1000;
  const open = pool.connection === "open" && pool.takenAt !== null;
  const stale = pool.takenAt !== null && (!open || silentS > STALE_S);
  let word = open ? "Live" : "Connecting";
  let tone = open ? "ok" : "moving";
  if (stale) {
    word = open ? `No news for ${age(silentS)}` : `Reconnecting, ${age(silentS)} old`;
    tone = open ? "warn" : "moving";
  }
  setText(element, word);
  setAttribute(element, "data-tone", tone);
  setAttribute(element, "data-ws-state", open && !stale ? "live" : pool.connection === "open" ? "waiting" : pool.connection);
  document.body.classList.toggle("is-stale", stale);
}

function draw() {
  drawConnection();
  if (pool.snapshot === null) return;
  const { engines, sessions, attention, stores, work, session_pages: pages = [], release } = pool.snapshot;
  const hosts = pool.snapshot.hosts.filter((host) => host.duty !== "retired");
  const left = pool.snapshot.hosts.filter((host) => host.duty === "retired").map((host) => host.name);
  const now = serverNow();
  drawSummary(hosts, engines);
  drawAttention(attention);
  drawWork(work);
  drawHosts(byId("hosts"), hosts, { engines, stores, release, now, staleS: STALE_S });
  byId("left-hosts").hidden = left.length === 0;
  setText(byId("left-hosts"), `Left the pool: ${left.join(", ")}`);
  drawSessions(byId("sessions"), sessions, pages, now);
  byId("no-hosts").hidden = hosts.length > 0;
  byId("no-engines").hidden = hosts.length === 0 || engines.length > 0;
  byId("sessions-table").hidden = sessions.length === 0;
  byId("no-sessions").hidden = sessions.length > 0;
}

function drawSummary(hosts, engines) {
  const devices = hosts.reduce((sum, host) => sum + host.gpus.length, 0);
  const ready = engines.filter((card) => card.engine.state === "ready").length;
  if (!hosts.length) {
    setText(byId("summary"), "Waiting for the first machine");
    return;
  }
  const parts = [`${plural(hosts.length, "host")}, ${plural(devices, "device")}`];
  const lost = hosts.filter((host) => host.state === "lost").length;
  const leaving = hosts.filter((host) => host.duty !== "active").length;
  if (lost) parts.push(`${count(lost)} lost`);
  if (leaving) parts.push(`${count(leaving)} to be emptied`);
  if (engines.length) parts.push(`${count(ready)} of ${plural(engines.length, "engine")} ready`);
  const sample = pool.samples.at(-1);
  if (sample?.slots) parts.push(`${count(sample.busy_slots)} of ${plural(sample.slots, "slot")} busy`);
  if (sample?.tokens_per_s) parts.push(`${rate(sample.tokens_per_s)} tokens/s`);
  const silentS = (performance.now() - pool.receivedAtMs) / 1000;
  if (document.body.classList.contains("is-stale")) parts.unshift(`as of ${age(silentS)} ago`);
  setText(byId("summary"), parts.join(" · "));
}

function drawAttention(attention) {
  byId("attention").hidden = attention.length === 0;
  keyed(
    byId("attention-items"),
    attention,
    (item) => `${item.subject} ${item.message}`,
    (item) =>
      h("div", { class: "attention-item", "data-severity": item.severity, role: "alert" },
        h("p", {}, h("strong", {}, item.subject), " ", item.message),
        h("p", { class: "attention-hint" }, item.hint)),
    () => {},
  );
}

/** Builds and downloads that wait or run, each with how far it is. */
function drawWork(work) {
  byId("work").hidden = work.length === 0;
  keyed(
    byId("work-items"),
    work,
    (item) => item.id,
    (item) =>
      h("div", { class: "work-item" },
        h("p", {}, h("strong", {}, item.kind === "build" ? `llama.cpp for ${item.subject}` : item.subject), ` on ${item.host}`),
        h("progress", { "aria-label": `${item.kind} of ${item.subject}`, max: 1 }),
        h("p", { class: "work-state" })),
    (element, item) => {
      const bar = element.querySelector("progress");
      // Only what runs may look as if it moved.
      bar.hidden = item.state === "queued";
      if (item.total) bar.value = item.done / item.total;
      else bar.removeAttribute("value");
      const amount = item.kind === "download" ? bytesOf(item.done, item.total) : `${count(item.done)} of ${plural(item.total, "step")}`;
      const stage = item.state === "queued" ? "waits for its host" : item.stage;
      setText(element.querySelector(".work-state"), item.total ? `${stage}, ${amount}` : stage);
    },
  );
}

// Ages grow while nothing arrives, which is exactly when they matter.
setInterval(draw, 1000);
