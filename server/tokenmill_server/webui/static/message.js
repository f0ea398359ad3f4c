/** How one message of the conversation looks: its text, reasoning, images, what it took, what went wrong. */

import { button, copyButton, element } from "./dom.js";
import { picture } from "./images.js";
import { GrowingText } from "./markdown.js";

export class UserMessage {
  constructor(text, images) {
    this.text = text;
    this.images = images;
    const body = element("div", "text", text);
    const pictures = images.map((url, index) => picture(url, `Attached image ${index + 1}`));
    this.node = element("li", "user", element("h3", "unseen", "You"), ...pictures, ...(text ? [body] : []));
  }

  toRequest() {
    if (this.images.length === 0) return { role: "user", content: this.text };
    const parts = this.images.map((url) => ({ type: "image_url", image_url: { url } }));
    if (this.text) parts.push({ type: "text", text: this.text });
    return { role: "user", content: parts };
  }
}

export class Answer {
  text = "";
  reasoning = "";
  #isDrawn = true;
  #reasoningStarted = 0;
  #reasoningEnded = 0;

  /** `onChange` is called after something of it was drawn. */
  constructor(onChange) {
    this.onChange = onChange;
    this.body = element("div", "text");
    this.growing = new GrowingText(this.body);
    this.foot = element("p", "foot");
    this.node = element("li", "assistant", element("h3", "unseen", "Model"), this.body, this.foot);
    this.node.setAttribute("aria-busy", "true");
    this.node.classList.add("busy");
  }

  get isEmpty() {
    return this.text === "" && this.reasoning === "";
  }

  /** Drawn with the next picture of the screen, however many tokens came until then. */
  add(text, reasoning) {
    const now = performance.now();
    if (reasoning) this.#reasoningStarted ||= now;
    if (text && this.#reasoningStarted) this.#reasoningEnded ||= now;
    this.text += text;
    this.reasoning += reasoning;
    if (this.#isDrawn) {
      this.#isDrawn = false;
      requestAnimationFrame(() => this.#draw());
    }
  }

  /** `notes` say what it took; `onRetry` asks for another one. */
  finish(notes, onRetry) {
    this.#reasoningEnded ||= performance.now();
    this.#draw();
    this.node.classList.remove("busy");
    this.node.removeAttribute("aria-busy");
    const actions = [button("Again", onRetry)];
    if (this.text) actions.unshift(copyButton(() => this.text, "answer"));
    this.foot.append(element("span", "notes", notes.join(" · ")), element("span", "actions", ...actions));
  }

  fail(error) {
    const line = [error.status ? `HTTP ${error.status}` : "", error.code, error.param].filter(Boolean).join(" · ");
    const box = element("div", "error", element("p", "", error.message));
    if (line) box.append(element("p", "hint", line));
    if (error.requestId) box.append(element("p", "hint", `Request ${error.requestId}`));
    box.setAttribute("role", "alert");
    this.foot.before(box);
  }

  /** It can no longer be asked for again. */
  settle() {
    this.foot.querySelector(".actions > :last-child")?.remove();
  }

  toRequest() {
    return { role: "assistant", content: this.text };
  }

  #draw() {
    if (this.#isDrawn) return;
    this.#isDrawn = true;
    if (this.reasoning) this.#drawReasoning();
    this.growing.show(this.text);
    this.onChange();
  }

  #drawReasoning() {
    if (!this.thoughts) {
      this.summary = element("summary");
      const body = element("div", "text");
      this.thoughts = new GrowingText(body);
      this.body.before(element("details", "reasoning", this.summary, body));
    }
    this.thoughts.show(this.reasoning);
    const seconds = ((this.#reasoningEnded - this.#reasoningStarted) / 1000).toFixed(1);
    this.summary.textContent = this.#reasoningEnded ? `Thought for ${seconds} s` : "Thinking…";
  }
}
