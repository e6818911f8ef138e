// What is wanted of a host, and the form by which the staff asks for something else. The server checks who asks.

import { setAttribute, setText } from "./dom.js";
import { plural } from "./format.js";

export const DUTY_WORDS = { draining: "draining", retiring: "retiring", retired: "has left" };
const RUNNING = new Set(["starting", "ready", "unhealthy", "draining", "stopping"]);

/** The form, closed; null on the pages of people who may not use it. */
export function createDuty() {
  const template = document.getElementById("host-duty");
  return template === null ? null : template.content.firstElementChild.cloneNode(true);
}

/** A link to what would move where if an engine or a card got empty; null on the pages of people who may not do that. */
export function createDrainLink() {
  const template = document.getElementById("drain-link");
  return template === null ? null : template.content.firstElementChild.cloneNode(true);
}

export function updateDrainLink(element, kind, id, words) {
  const link = element.querySelector(`:scope > .drain-link, :scope > header > .drain-link`);
  if (link === null) return;
  link.hidden = words === "" || !link.dataset.kinds.split(" ").includes(kind);
  setText(link, words);
  setAttribute(link, "href", link.dataset.href.replace("/kind/0/", `/${kind}/${id}/`));
}

/** `context` is that of the pool map: a host, its engines' cards, all hosts and engines. */
export function updateDuty(element, context) {
  const root = element.querySelector(":scope .host-duty");
  if (root === null) return;
  const { host } = context;
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const form = root.querySelector("form");
  setAttribute(form, "action", form.dataset.action.replace("/0/", `/${host.id}/`));
  const drains = host.duty === "active";
  setText(part("duty-summary"), drains ? "Drain…" : "Serve again…");
  setText(part("duty-button"), `Let ${host.name} serve again`);
  part("duty-button").value = "serve";
  part("duty-button").hidden = drains;
  part("duty-preview").hidden = !drains;
  setAttribute(part("duty-preview"), "href", part("duty-preview").dataset.href.replace("/0/", `/${host.id}/`));
  setText(part("duty-words"), drains ? drainWords(context) : "It takes new requests again, and its engines that are wanted start again.");
}

/** What draining will mean here and now. */
function drainWords({ host, cards, engines, hosts }) {
  const running = cards.filter(({ engine }) => RUNNING.has(engine.state));
  if (!running.length) return "No engine runs here. None will be started until it serves again.";
  const busy = cards.flatMap((card) => card.cells).filter((cell) => cell.state !== "idle").length;
  const words = [`${plural(running.length, "engine")} here ${running.length === 1 ? "takes" : "take"} nothing new, ${running.length === 1 ? "its" : "their"} conversations go on at others where these have room; ${plural(busy, "request")} ${busy === 1 ? "runs" : "run"} now.`];
  const serving = new Set(hosts.filter((other) => other.id !== host.id && other.duty === "active" && other.state !== "lost").map((other) => other.id));
  const elsewhere = new Set(engines.filter(({ engine }) => engine.state === "ready" && engine.takes_new && serving.has(engine.host_id)).map(({ engine }) => engine.model_name));
  const only = [...new Set(running.map(({ engine }) => engine.model_name))].filter((name) => !elsewhere.has(name));
  if (only.length) words.push(`No other host serves ${only.join(", ")} now.`);
  return words.join(" ");
}
