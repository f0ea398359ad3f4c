/** The conversation: sends it, shows the answer as it comes, stops it. */

import { ApiError, request } from "./api.js";
import { $, announce } from "./dom.js";
import { followEnd } from "./follow.js";
import { Answer, UserMessage } from "./message.js";
import { events } from "./stream.js";

export class Chat {
  /** Pairs of a question and its answer. Those without an answer are shown faintly: they are not sent again. */
  #turns = [];
  #running = null;
  #view = followEnd($("conversation"));

  constructor(settings, attachments, onError) {
    this.settings = settings;
    this.attachments = attachments;
    this.onError = onError;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    $("prompt").addEventListener("input", fitPrompt);
    $("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.stop();
    });
    $("new-chat").addEventListener("click", () => this.clear());
  }

  stop() {
    if (!this.#running) return;
    this.#running.abort();
    focusPrompt();
  }

  clear() {
    this.stop();
    this.#turns = [];
    $("messages").replaceChildren();
    $("welcome").hidden = false;
    $("composer-hint").textContent = "";
    focusPrompt();
  }

  /** Puts `text` where messages are written. */
  suggest(text) {
    $("prompt").value = text;
    fitPrompt();
    $("prompt").focus();
  }

  #submit() {
    if (this.#running) return;
    const text = $("prompt").value.trim();
    const fields = this.#fields();
    if (!fields) return;
    const images = this.attachments.take();
    if (!text && images.length === 0) return;
    $("prompt").value = "";
    fitPrompt();
    this.#turns.at(-1)?.answer.settle();
    const question = new UserMessage(text, images);
    $("messages").append(question.node);
    this.#ask(question, fields);
  }

  #retry(turn) {
    const fields = this.#fields();
    if (this.#running || !fields) return;
    turn.answer.node.remove();
    this.#turns.pop();
    this.#ask(turn.question, fields);
  }

  /** Of the controls; null, and a hint, if one is wrong. */
  #fields() {
    $("composer-hint").textContent = "";
    try {
      if (!this.settings.model) throw new Error("The server has not said yet what it serves.");
      return this.settings.fields();
    } catch (error) {
      $("composer-hint").textContent = error.message;
      return null;
    }
  }

  #messages(question) {
    const system = this.settings.systemPrompt;
    const said = this.#turns.filter(({ answer }) => answer.text);
    const messages = said.flatMap((turn) => [turn.question.toRequest(), turn.answer.toRequest()]);
    if (system.trim()) messages.unshift({ role: "system", content: system });
    return [...messages, question.toRequest()];
  }

  async #ask(question, fields) {
    const body = { ...fields, messages: this.#messages(question), stream: true };
    body.stream_options = { include_usage: true };
    const answer = new Answer(this.#view.grew);
    const turn = { question, answer };
    this.#turns.push(turn);
    $("welcome").hidden = true;
    $("messages").append(answer.node);
    this.#view.toEnd();
    this.#running = new AbortController();
    showRunning(true);
    const notes = await this.#receive(answer, body, this.#running.signal);
    this.#running = null;
    showRunning(false);
    answer.finish(notes, () => this.#retry(turn));
    question.node.classList.toggle("unsent", !answer.text);
    this.#view.grew();
  }

  /** Fills `answer`. Returns notes about it. */
  async #receive(answer, body, signal) {
    const watch = new Stopwatch();
    try {
      const response = await request("v1/chat/completions", { body, signal });
      for await (const event of events(response)) read(event, answer, watch);
      announce("The answer is complete.");
      return watch.notes();
    } catch (error) {
      if (signal.aborted) {
        announce("Stopped.");
        return ["stopped", `${watch.seconds().toFixed(1)} s`];
      }
      const shown = error instanceof ApiError ? error : new ApiError(`The answer cannot be read: ${error.message}`);
      answer.fail(shown);
      this.onError(shown);
      return [];
    }
  }
}

/** Takes one chunk of a stream into `answer`. */
function read(event, answer, watch) {
  if (event.usage) watch.usage = event.usage;
  const [choice] = event.choices;
  if (!choice) return;
  if (choice.finish_reason) watch.finishReason = choice.finish_reason;
  const text = choice.delta.content ?? choice.delta.refusal ?? "";
  const reasoning = choice.delta.reasoning ?? choice.delta.reasoning_content ?? "";
  if (!text && !reasoning) return;
  watch.tick();
  answer.add(text, reasoning);
}

/** Times of one answer. */
class Stopwatch {
  usage = null;
  finishReason = null;
  #started = performance.now();
  #first = 0;
  #last = 0;

  seconds() {
    return (performance.now() - this.#started) / 1000;
  }

  tick() {
    this.#last = performance.now();
    this.#first ||= this.#last;
  }

  notes() {
    const notes = [];
    const count = this.usage?.completion_tokens ?? 0;
    if (this.usage) notes.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    if (this.#first) notes.push(`first after ${((this.#first - this.#started) / 1000).toFixed(2)} s`);
    const streamed = (this.#last - this.#first) / 1000;
    if (count > 1 && streamed > 0) notes.push(`${((count - 1) / streamed).toFixed(1)} tokens/s`);
    if (this.finishReason === "length") notes.push("cut at the limit of tokens");
    else if (this.finishReason && this.finishReason !== "stop") notes.push(this.finishReason);
    return notes;
  }
}

function showRunning(isRunning) {
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  focusPrompt();
}

/** Where there is a keyboard; elsewhere it would cover half of the screen. */
function focusPrompt() {
  if (matchMedia("(pointer: fine)").matches) $("prompt").focus({ preventScroll: true });
}

function fitPrompt() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + prompt.offsetHeight - prompt.clientHeight}px`;
}
