/** What the charts need of Prometheus' text format, and rates from counters. */

const COUNTERS = [
  "generation_tokens_total",
  "prompt_tokens_total",
  "num_preemptions_total",
  "prefix_cache_queries_total",
  "prefix_cache_hits_total",
];
const GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"];
const WANTED = new Set([...COUNTERS, ...GAUGES]);

/**
 * The wanted series of all engine cores: sums; of the use of KV caches the highest. A server may export every series
 * under two prefixes, of which the first counts. null if there are none.
 */
export function readMetrics(text) {
  const found = {};
  let prefix = null;
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":");
    if (line[0] === "#" || colon < 0) continue;
    const name = /^\w+/.exec(line.slice(colon + 1))?.[0];
    if (!WANTED.has(name)) continue;
    prefix ??= line.slice(0, colon);
    if (line.slice(0, colon) !== prefix) continue;
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    const isShare = name === "kv_cache_usage_perc";
    found[name] = isShare ? Math.max(found[name] ?? 0, value) : (found[name] ?? 0) + value;
  }
  return prefix === null ? null : found;
}

/** Turns readings into what happened between them. */
export class Rates {
  #last = null;
  #lastTime = 0;

  /**
   * `{seconds, grown}` since the last reading, `grown` by the name of the counter; null for the first one. A counter
   * that went back began anew: a process was restarted.
   */
  between(reading, time) {
    const last = this.#last;
    const seconds = (time - this.#lastTime) / 1000;
    [this.#last, this.#lastTime] = [reading, time];
    if (last === null || reading === null || seconds <= 0) return null;
    const grown = {};
    for (const name of COUNTERS) {
      const [now, before] = [reading[name] ?? 0, last[name] ?? 0];
      grown[name] = now < before ? now : now - before;
    }
    return { seconds, grown };
  }
}
