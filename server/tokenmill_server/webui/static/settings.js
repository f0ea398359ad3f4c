/** The controls of a request. What is left empty is not sent: the server's default holds. */

import { $ } from "./dom.js";

const SAVED = "tokenmill.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SLIDERS = ["temperature", "top_p"];
const FIELDS = [...NUMBERS, "model", "system", "stop-strings"];

export class Settings {
  #defaults = { temperature: 1, top_p: 1 };

  constructor() {
    for (const name of SLIDERS) {
      const [number, slider] = [$(name), $(`${name}-range`)];
      slider.addEventListener("input", () => (number.value = slider.value));
      number.addEventListener("input", () => this.#placeSlider(name));
      this.#placeSlider(name);
    }
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("controls").addEventListener("input", () => this.#save());
    $("reset").addEventListener("click", () => this.#reset());
  }

  /** What the server serves, and its own defaults. */
  offer({ models, sampling, max_model_len }) {
    $("model").replaceChildren(...models.map((name) => new Option(name)));
    Object.assign(this.#defaults, sampling);
    for (const name of SLIDERS) $(name).placeholder = this.#defaults[name];
    $("max_tokens").max = max_model_len;
    if (sampling.max_tokens) $("max_tokens").placeholder = sampling.max_tokens;
    this.#restore(models);
  }

  get model() {
    return $("model").value;
  }

  get systemPrompt() {
    return $("system").value;
  }

  /** The fields of a request. Throws Error, in words for the user, for a control with a wrong value. */
  fields() {
    const fields = { model: this.model };
    for (const name of NUMBERS) {
      const { value, validity, validationMessage, labels } = $(name);
      if (!validity.valid) throw new Error(`${labels[0].textContent}: ${validationMessage}`);
      if (value !== "") fields[name] = Number(value);
    }
    const stops = $("stop-strings").value.split("\n").filter(Boolean);
    if (stops.length) fields.stop = stops.map((text) => text.replaceAll("\\n", "\n"));
    return fields;
  }

  #placeSlider(name) {
    const { value } = $(name);
    $(`${name}-range`).value = value === "" ? this.#defaults[name] : value;
  }

  #reset() {
    $("controls").reset();
    SLIDERS.forEach((name) => this.#placeSlider(name));
    sessionStorage.removeItem(SAVED);
  }

  #save() {
    const values = Object.fromEntries(FIELDS.map((name) => [name, $(name).value]));
    sessionStorage.setItem(SAVED, JSON.stringify(values));
  }

  #restore(models) {
    const values = JSON.parse(sessionStorage.getItem(SAVED) ?? "{}");
    if (!models.includes(values.model)) delete values.model;
    for (const [name, value] of Object.entries(values)) $(name).value = value;
    SLIDERS.forEach((name) => this.#placeSlider(name));
  }
}
