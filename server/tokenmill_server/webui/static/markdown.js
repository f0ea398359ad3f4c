/**
 * Answers as paragraphs, code blocks, `code` and **bold**: what reads badly as it is written. Everything is put into the
 * document as text, whatever it looks like.
 */

import { copyButton, element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
// Spans have a longest length: without one, a text that opens many and closes none would take quadratic time.
const INLINE = /(?<!`)(`{1,3})(?!`)(.{1,1000}?)(?<!`)\1(?!`)|\*\*(?!\s)(.{1,1000}?)(?<!\s)\*\*/gs;
const LONGEST_FENCE = 200;
const HEADING = /^#{1,6} +(\S.*)$/;

/** Text as blocks `{kind: "text" | "heading" | "code", text, language}`. A code block may be without its end. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const close = (kind, language = "") => {
    const content = lines.join("\n");
    if (kind === "code" || content.trim()) found.push({ kind, text: content, language });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const match = line.length > LONGEST_FENCE ? null : FENCE.exec(line);
    if (fence) {
      const isEnd = match && !match[2] && match[1][0] === fence.mark[0] && match[1].length >= fence.mark.length;
      if (isEnd) {
        close("code", fence.language);
        fence = null;
      } else lines.push(line);
    } else if (match) {
      close("text");
      fence = { mark: match[1], language: match[2] };
    } else if (HEADING.test(line)) {
      close("text");
      lines.push(HEADING.exec(line)[1]);
      close("heading");
    } else if (line.trim() === "") close("text");
    else lines.push(line);
  }
  close(fence ? "code" : "text", fence?.language);
  return found;
}

/** Shows a text that grows: what is already there and did not change is left alone. */
export class GrowingText {
  #shown = [];

  constructor(container) {
    this.container = container;
  }

  show(text) {
    const wanted = blocks(text);
    wanted.forEach((block, index) => {
      const old = this.#shown[index];
      if (old?.text === block.text && old.kind === block.kind && old.language === block.language) return;
      if (old && old.kind === "code" && block.kind === "code" && old.language === block.language) {
        old.node.querySelector("code").textContent = block.text;
        this.#shown[index] = { ...block, node: old.node };
        return;
      }
      const node = block.kind === "code" ? codeBlock(block) : paragraph(block);
      if (old) old.node.replaceWith(node);
      else this.container.append(node);
      this.#shown[index] = { ...block, node };
    });
    for (const { node } of this.#shown.splice(wanted.length)) node.remove();
  }
}

function paragraph({ kind, text }) {
  const node = element("p", kind === "heading" ? "heading" : "");
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    node.append(text.slice(end, match.index));
    node.append(match[1] ? element("code", "", match[2]) : element("strong", "", match[3]));
    end = match.index + match[0].length;
  }
  node.append(text.slice(end));
  return node;
}

function codeBlock({ text, language }) {
  const code = element("code", "", text);
  const head = element("div", "code-head", element("span", "", language || "code"));
  head.append(copyButton(() => code.textContent, "code"));
  const pre = element("pre", "", code);
  pre.tabIndex = 0; // long lines scroll, by keyboard too
  return element("div", "code", head, pre);
}
