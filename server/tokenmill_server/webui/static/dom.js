/** Small helpers for the document. Text only ever becomes text: nothing here takes HTML. */

export const $ = (id) => document.getElementById(id);

/** An element with a class (or none) and children, which are elements or strings. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function button(label, onClick, className = "quiet") {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

/** A button that puts the text that `getText` returns on the clipboard. */
export function copyButton(getText, what) {
  const made = button("Copy", async () => {
    let label = "Copied";
    try {
      await writeClipboard(getText());
    } catch {
      label = "Not allowed";
    }
    made.textContent = label;
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  made.setAttribute("aria-label", `Copy ${what}`);
  return made;
}

/** Pages that come without HTTPS from another machine have no clipboard but the old one. */
async function writeClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("no clipboard");
}

/** Tells users of screen readers. */
export function announce(text) {
  $("announce").textContent = text;
}
