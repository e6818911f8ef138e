// What a device tells of itself besides its memory: load, heat, power, clock, link, who holds its memory, and what is wrong.

import { h, keyed, setText } from "./dom.js";
import { age, bytes, count, plural } from "./format.js";

export function createDeviceFacts() {
  return h("div", { class: "device-foot" },
    h("p", { class: "device-problem", "data-part": "problem", "data-testid": "device-problem" }),
    h("p", { class: "device-facts", "data-part": "device-facts", "data-testid": "device-facts" }),
    h("details", { class: "processes", "data-part": "processes", "data-testid": "device-processes" },
      h("summary", { "data-part": "process-count" }),
      h("ul", { "data-part": "process-list" })));
}

/** `stale` is the age of the device's numbers in seconds when they are too old to be called current, else null. */
export function updateDeviceFacts(element, gpu, stale) {
  const part = (name) => element.querySelector(`:scope [data-part="${name}"]`);
  const facts = deviceFacts(gpu);
  if (stale !== null) facts.push(`measured ${age(stale)} ago`);
  setText(part("device-facts"), facts.join(" · "));
  part("device-facts").hidden = facts.length === 0;
  part("problem").hidden = !gpu.problem;
  setText(part("problem"), gpu.problem);
  part("problem").title = gpu.problem_hint;
  part("processes").hidden = gpu.processes.length === 0;
  setText(part("process-count"), `${plural(gpu.processes.length, "process holds", "processes hold")} its memory`);
  keyed(part("process-list"), gpu.processes, (process) => process.pid, () => h("li"), (item, process) => {
    const size = process.memory_bytes === null ? "memory not told" : bytes(process.memory_bytes);
    setText(item, `${process.name || "of another container"}, pid ${process.pid}: ${size}`);
  });
}

/** One phrase for each number that the device tells; what it does not tell is left out. */
function deviceFacts(gpu) {
  const facts = [];
  if (gpu.utilization_percent !== null) facts.push(`${Math.round(gpu.utilization_percent)} % busy`);
  if (gpu.temperature_c !== null) facts.push(`${Math.round(gpu.temperature_c)} °C`);
  if (gpu.power_w !== null) facts.push(ofMost(Math.round(gpu.power_w), gpu.power_limit_w, "W"));
  if (gpu.clock_mhz !== null) facts.push(ofMost(gpu.clock_mhz, gpu.clock_max_mhz, "MHz"));
  if (gpu.pcie_generation !== null && gpu.pcie_width !== null) {
    const most = gpu.pcie_width_max !== null && gpu.pcie_width < gpu.pcie_width_max ? ` of ${gpu.pcie_width_max}` : "";
    facts.push(`PCIe ${gpu.pcie_generation}.0, ${gpu.pcie_width}${most} lanes`);
  }
  return facts;
}

function ofMost(value, most, unit) {
  return most === null ? `${count(value)} ${unit}` : `${count(value)} of ${count(Math.round(most))} ${unit}`;
}
