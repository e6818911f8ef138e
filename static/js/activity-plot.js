// Tokens per second (line, left axis) and busy slots (steps, right axis) over the last minutes. Draws with Plotly.

import { onThemeChange } from "./theme.js";
import { plural, rate } from "./format.js";

const GAP_S = 4;
let latest = null;

/** A custom property's colour as Plotly understands it: resolved by the browser, since it may be a light-dark() pair. */
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/**
 * Samples as plot points. Where nothing was measured, the line breaks and the steps leave their area empty: a filled trace
 * would be joined across a gap, so its points there lie on the axis and their label says what they are.
 */
function points(samples, now) {
  const drawn = { seconds: [], rates: [], busy: [], labels: [] };
  const add = (atS, tokensPerS, busySlots) => {
    drawn.seconds.push(atS - now);
    drawn.rates.push(tokensPerS);
    drawn.busy.push(busySlots ?? 0);
    drawn.labels.push(busySlots === null ? "not measured" : `${busySlots} busy`);
  };
  let before = null;
  for (const sample of samples) {
    if (before !== null && sample.at_s - before > GAP_S) {
      add(before + 0.5, null, null);
      add(sample.at_s - 0.5, null, null);
    }
    add(sample.at_s, sample.tokens_per_s, sample.busy_slots);
    before = sample.at_s;
  }
  return drawn;
}

function axis(extra) {
  return { zeroline: false, showline: false, fixedrange: true, tickfont: { size: 11, color: colour("--ink-3") }, ...extra };
}

function layout(historyS, highestRate, highestSlots) {
  const most = Math.max(4, highestSlots);
  return {
    autosize: true,
    height: 250,
    margin: { l: 34, r: 26, t: 8, b: 26 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("--ink-2") },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--line-strong"), font: { color: colour("--ink"), size: 12 } },
    xaxis: axis({
      range: [-historyS, 0],
      tickvals: [-240, -180, -120, -60, 0],
      ticktext: ["4 min ago", "3", "2", "1", "now"],
      showgrid: false,
      hoverformat: ".0f",
    }),
    yaxis: axis({ range: [0, Math.max(10, highestRate * 1.15)], gridcolor: colour("--line"), nticks: 5 }),
    // Its zero is that of the left axis, and would lie on the word "now".
    yaxis2: axis({ overlaying: "y", side: "right", range: [0, most * 1.15], tickvals: [1, 2, 3, 4].map((step) => step * Math.ceil(most / 4)).filter((value) => value <= most), showgrid: false }),
  };
}

function traces({ seconds, rates, busy, labels }) {
  const accent = colour("--accent");
  return [
    { x: seconds, y: busy, text: labels, yaxis: "y2", name: "busy slots", mode: "lines", line: { shape: "hv", width: 0, color: colour("--ink-3") }, fill: "tozeroy", fillcolor: colour("--working"), hovertemplate: "%{text}<extra></extra>" },
    { x: seconds, y: rates, name: "tokens/s", mode: "lines", line: { width: 1.75, color: accent }, hovertemplate: "%{y:.1f} tokens/s<extra></extra>" },
  ];
}

/** Draws the samples of the last `historyS` seconds before `now` (the server's clock). */
export function drawActivity(samples, now, historyS) {
  latest = [samples, now, historyS];
  const measured = samples.filter((sample) => sample.tokens_per_s !== null);
  const plot = document.getElementById("activity-plot");
  document.getElementById("activity-empty").hidden = measured.length > 0;
  plot.hidden = measured.length === 0;
  const last = samples.at(-1);
  const known = last !== undefined && last.tokens_per_s !== null;
  document.getElementById("activity-now").hidden = !known;
  if (known) {
    document.getElementById("rate-now").textContent = `${rate(last.tokens_per_s)} tokens/s`;
    document.getElementById("busy-now").textContent = `${plural(last.busy_slots, "busy slot")}`;
  }
  // Plotly is a large deferred script; the numbers above do not wait for it.
  if (!measured.length || !globalThis.Plotly || document.hidden) return;
  const highestRate = Math.max(...measured.map((sample) => sample.tokens_per_s));
  const highestSlots = Math.max(...measured.map((sample) => sample.slots));
  globalThis.Plotly.react(plot, traces(points(samples, now)), layout(historyS, highestRate, highestSlots), { displayModeBar: false, responsive: true });
}

onThemeChange(() => latest && drawActivity(...latest));
document.addEventListener("visibilitychange", () => latest && drawActivity(...latest));
