/** Images for the next message: chosen, pasted or dropped. They stay in the page until they are sent. */

import { $, button, element } from "./dom.js";

const LARGEST_BYTES = 20 * 1024 * 1024; // a request has at most 32 MiB, and base64 makes four bytes of three

export class Attachments {
  #urls = [];
  #limit = 0;

  constructor() {
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => {
      this.add($("files").files);
      $("files").value = "";
    });
    $("prompt").addEventListener("paste", (event) => this.add(event.clipboardData.files, event));
    $("chat").addEventListener("dragover", (event) => event.preventDefault());
    $("chat").addEventListener("drop", (event) => this.add(event.dataTransfer.files, event));
  }

  /** How many images the model takes in a conversation; 0: it takes text alone. */
  offer(limit) {
    this.#limit = limit;
    $("attach").hidden = limit === 0;
  }

  async add(files, event) {
    if (files.length === 0) return;
    event?.preventDefault();
    const hint = $("composer-hint");
    hint.textContent = "";
    for (const file of [...files]) { // the input's own list is emptied meanwhile
      if (this.#limit === 0) hint.textContent = "This model takes no images.";
      else if (!file.type.startsWith("image/")) hint.textContent = `${file.name} is no image.`;
      else if (file.size > LARGEST_BYTES) hint.textContent = `${file.name} is larger than 20 MiB.`;
      else if (this.#urls.length >= this.#limit) hint.textContent = `The model takes up to ${this.#limit} images.`;
      else this.#urls.push(await dataUrl(file));
    }
    this.#show();
  }

  /** The images as data URLs; they are the message's from now on. */
  take() {
    const urls = this.#urls;
    this.#urls = [];
    this.#show();
    return urls;
  }

  #show() {
    const items = this.#urls.map((url, index) => {
      const remove = button("Remove", () => {
        this.#urls.splice(index, 1);
        this.#show();
        $("prompt").focus();
      });
      remove.setAttribute("aria-label", `Remove image ${index + 1}`);
      return element("li", "", picture(url, `Image ${index + 1}`), remove);
    });
    $("attachments").replaceChildren(...items);
  }
}

export function picture(url, description) {
  const image = element("img");
  image.src = url;
  image.alt = description;
  return image;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
