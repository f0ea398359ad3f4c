/** Asks the server how it is while somebody looks, and draws what it says. */

import { health, request } from "./api.js";
import { Chart } from "./chart.js";
import { $ } from "./dom.js";
import { Rates, readMetrics } from "./metrics.js";

const INTERVAL_MS = 2000;
const GOOD = new Set(["ok"]);
const PASSING = new Set(["starting", "draining", "stalled"]);

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const small = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const count = (value) => (value < 100 ? small : number).format(value);
const percent = (value) => `${small.format(value * 100)} %`;

export class Live {
  #rates = new Rates();
  #timer = 0;
  #isAsking = false;
  #charts = {
    tokens: new Chart({ title: "Tokens / s", format: count, least: 10 }),
    running: new Chart({ title: "Running", format: count }),
    waiting: new Chart({ title: "Waiting", format: count }),
    cache: new Chart({ title: "KV cache", format: percent, top: 1 }),
    preemptions: new Chart({ title: "Preemptions / s", format: count }),
  };

  constructor() {
    $("charts").append(...Object.values(this.#charts).map((chart) => chart.node));
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Asks now, and again and again while the page is in sight. */
  start() {
    clearTimeout(this.#timer);
    if (!document.hidden) this.#ask();
  }

  async #ask() {
    if (this.#isAsking) return;
    this.#isAsking = true;
    await Promise.all([this.#askHealth(), this.#askMetrics()]);
    this.#isAsking = false;
    if (!document.hidden) this.#timer = setTimeout(() => this.#ask(), INTERVAL_MS);
  }

  async #askHealth() {
    let state = { status: "unreachable" };
    try {
      state = await health();
    } catch {
      // The state says it.
    }
    const { status, reason, engines = [] } = state;
    const kind = GOOD.has(status) ? "good" : PASSING.has(status) ? "passing" : "bad";
    const faults = engines.map((engine) => `engine ${engine.engine} ${engine.status}`);
    const pill = $("health");
    const text = [status === "ok" ? "ready" : status, ...faults].join(", ");
    if (pill.textContent !== text) pill.textContent = text; // screen readers hear of changes alone
    pill.dataset.state = kind === "good" && faults.length ? "passing" : kind;
    pill.title = reason ?? "";
  }

  async #askMetrics() {
    let reading = null;
    let hint = "";
    try {
      reading = readMetrics(await (await request("metrics")).text());
      if (reading === null) hint = "The server keeps no statistics (--disable-log-stats).";
    } catch (error) {
      hint = error.status === 401 ? "The charts need the API key, too." : error.message;
    }
    if ($("live-hint").textContent !== hint) $("live-hint").textContent = hint;
    this.#draw(reading);
  }

  #draw(reading) {
    const milliseconds = performance.now();
    const change = this.#rates.between(reading, milliseconds);
    const perSecond = (name) => (change === null ? null : change.grown[name] / change.seconds);
    const time = milliseconds / 1000;
    const prompt = perSecond("prompt_tokens_total");
    const charts = this.#charts;
    const gauge = (name) => reading?.[name] ?? null;
    charts.tokens.push(time, perSecond("generation_tokens_total"), prompt ? `prompts ${count(prompt)} / s` : "");
    charts.running.push(time, gauge("num_requests_running"));
    charts.waiting.push(time, gauge("num_requests_waiting"));
    charts.cache.push(time, gauge("kv_cache_usage_perc"), prefixNote(reading));
    const preempted = gauge("num_preemptions_total");
    const total = preempted ? `${number.format(preempted)} since the start` : "";
    charts.preemptions.push(time, perSecond("num_preemptions_total"), total);
  }
}

function prefixNote(reading) {
  const asked = reading?.prefix_cache_queries_total;
  return asked ? `prefix hits ${percent(reading.prefix_cache_hits_total / asked)}` : "";
}
