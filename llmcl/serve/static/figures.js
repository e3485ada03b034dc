// The line of figures: times of tokens, progress of a prompt, and how full the context is.

import {byId, make} from "./elements.js";

const SVG = "http://www.w3.org/2000/svg";

function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

const ms = value => value.toFixed(1) + " ms";
const whole = value => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f"); // narrow spaces

// Draws the times between tokens in ms as bars, the latest 120.
export function showTimes(ttft, times) {
  const chart = byId("chart"), shown = times.slice(-120), most = Math.max(...shown, 1e-3);
  const title = chart.querySelector("title");
  chart.setAttribute("viewBox", "0 0 120 32");
  chart.replaceChildren(title, ...shown.map((time, i) => {
    const bar = document.createElementNS(SVG, "rect"), height = Math.max(1, 32 * time / most);
    const place = {x: i, y: 32 - height, width: 0.8, height};
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
    return bar;
  }));
  if (!times.length) return;
  const sorted = [...times].sort((a, b) => a - b), total = times.reduce((sum, time) => sum + time, 0);
  const [p50, p90, p99] = [0.5, 0.9, 0.99].map(share => `p${100 * share} ${ms(quantile(sorted, share))}`);
  const least = ms(sorted[0]), longest = ms(sorted[sorted.length - 1]);
  title.textContent = `time between tokens: min ${least}, ${p50}, ${p90}, ${p99}, max ${longest}`;
  const speed = (1000 * times.length / Math.max(total, 1e-3)).toFixed(1);
  const details = make("span", {className: "details"}, `, ${p90}, ${p99}`); // left out on a phone
  byId("figures").replaceChildren(`TTFT ${ms(ttft)}, TBT ${p50}`, details, `, ${times.length + 1} tokens, ${speed} tokens/s`);
}

export function clearFigures() {
  byId("chart").replaceChildren(byId("chart").querySelector("title"));
  byId("chart").querySelector("title").textContent = byId("figures").textContent = "";
  hideProgress();
}

// progress: the server's prompt_progress.
export function showProgress({total, cache, processed, time_ms: time}) {
  const bar = byId("progress"), done = Math.max(0, processed - cache);
  bar.hidden = false;
  bar.max = total;
  bar.value = processed;
  const speed = time > 0 && done > 0 ? `, ${whole(1000 * done / time)} tokens/s` : "";
  const cached = cache ? `, ${whole(cache)} from the cache` : "";
  byId("figures").textContent = `reading the prompt: ${whole(processed)} of ${whole(total)} tokens${cached}${speed}`;
}

export function hideProgress() {
  byId("progress").hidden = true;
}

// used: tokens after the last answer; 0: unknown.
export function showContext(used, context) {
  const meter = byId("full"), share = Math.min(1, used / context);
  meter.hidden = !used || !context;
  if (!meter.hidden) meter.value = share;
  byId("full-text").textContent = meter.hidden ? "" : `context ${Math.round(100 * share)}% full (${whole(used)})`;
}

export function contextText(context) {
  return `context ${whole(context)}`;
}
