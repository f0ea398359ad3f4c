/** One small chart of the last minutes: a line, its newest value, and any other value under the pointer. */

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 56;
const WINDOW_S = 120;
const GAP_S = 10;

function shape(name, className) {
  const made = document.createElementNS(SVG, name);
  made.setAttribute("class", className);
  return made;
}

/** The smallest of 1, 2, 5, 10, 20, … that is not below `value`. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.9999);
}

export class Chart {
  /** Times in seconds; `value` null where nothing is known. */
  points = [];

  /** `format` words a value; `top` is the end of the scale, if it is fixed, `least` its smallest end. */
  constructor({ title, format, top = null, least = 1 }) {
    Object.assign(this, { title, format, top, least });
    this.value = element("strong", "value", "–");
    this.note = element("span", "note");
    this.scale = element("span", "scale");
    this.cursor = element("span", "cursor");
    this.cursor.hidden = true;
    this.area = shape("path", "area");
    this.line = shape("path", "line");
    this.svg = shape("svg", "plot");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.svg.append(this.area, this.line);
    this.frame = element("div", "frame", this.svg, this.scale, this.cursor);
    this.frame.addEventListener("pointermove", (event) => this.#point(event));
    this.frame.addEventListener("pointerleave", () => this.#leave());
    const caption = element("figcaption", "", element("span", "title", title), this.note);
    this.node = element("figure", "chart", caption, this.value, this.frame);
  }

  /** Adds a value and draws. `note` is a short text beside the title. */
  push(time, value, note = "") {
    this.points.push({ time, value });
    while (this.points[0].time < time - WINDOW_S - GAP_S) this.points.shift();
    this.note.textContent = note;
    this.#draw();
    if (this.cursor.hidden) this.#show(value);
  }

  #show(value) {
    this.value.textContent = value === null ? "–" : this.format(value);
  }

  #x(time) {
    return WIDTH - ((this.points.at(-1).time - time) / WINDOW_S) * WIDTH;
  }

  #draw() {
    const highest = Math.max(0, ...this.points.map(({ value }) => value ?? 0));
    const top = this.top ?? ceiling(Math.max(this.least, highest));
    const line = [];
    const area = [];
    for (const run of this.#runs()) {
      const places = run.map(({ time, value }) => `${this.#x(time).toFixed(1)} ${y(value / top)}`);
      const [start, end] = [this.#x(run[0].time).toFixed(1), this.#x(run.at(-1).time).toFixed(1)];
      line.push(`M${places.join("L")}`);
      area.push(`M${start} ${HEIGHT}L${places.join("L")}L${end} ${HEIGHT}Z`);
    }
    this.line.setAttribute("d", line.join(""));
    this.area.setAttribute("d", area.join(""));
    this.scale.textContent = this.format(top);
    const now = this.points.at(-1).value;
    const summary = now === null ? "unknown" : `now ${this.format(now)}, at most ${this.format(highest)}`;
    this.svg.setAttribute("aria-label", `${this.title} in the last 2 minutes: ${summary}`);
  }

  /** Points that belong together: a line over a time without values would claim what nobody knows. */
  #runs() {
    const runs = [];
    let last = null;
    for (const point of this.points) {
      if (point.value === null) last = null;
      else {
        if (last === null || point.time - last.time > GAP_S) runs.push([]);
        runs.at(-1).push(point);
        last = point;
      }
    }
    return runs;
  }

  #point(event) {
    if (this.points.length === 0) return;
    const box = this.frame.getBoundingClientRect();
    const now = this.points.at(-1).time;
    const time = now - (1 - (event.clientX - box.left) / box.width) * WINDOW_S;
    const distance = (point) => Math.abs(point.time - time);
    const nearest = this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    this.cursor.hidden = false;
    this.cursor.style.left = `${(this.#x(nearest.time) / WIDTH) * 100}%`;
    this.#show(nearest.value);
    this.value.dataset.ago = `${Math.round(now - nearest.time)} s ago`;
  }

  #leave() {
    this.cursor.hidden = true;
    delete this.value.dataset.ago;
    if (this.points.length) this.#show(this.points.at(-1).value);
  }
}

function y(share) {
  return (HEIGHT - 1 - Math.min(1, share) * (HEIGHT - 3)).toFixed(1);
}
